"""Signals that ask a run to stop."""

import signal

from cosmos_core.run.interrupts import Interrupts


def test_signals_are_counted_and_are_as_before_afterwards():
    # They are counted and are as before afterwards.
    for number in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
        earlier, interrupts = signal.signal(number, signal.default_int_handler), Interrupts()
        try:
            with interrupts.counted():
                signal.raise_signal(number)
                signal.raise_signal(number)
            assert interrupts.number == 2
            assert signal.getsignal(number) is signal.default_int_handler
        finally:
            signal.signal(number, earlier)

    # A run that was started to outlive its terminal does.
    # As by `nohup`.
    before, interrupts = signal.signal(signal.SIGHUP, signal.SIG_IGN), Interrupts()
    try:
        with interrupts.counted():
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)
