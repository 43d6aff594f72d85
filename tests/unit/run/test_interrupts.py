"""Signals that ask a run to stop."""

import signal
import sys
import time

import pytest

from cosmos_core.run.interrupts import Interrupts, insistent


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


class Dropped:
    """Something in whose destructor a signal comes, or what else is raised there."""

    def __init__(self, call):
        self._call = call

    def __del__(self):
        self._call()


def test_a_signal_that_python_ignores_is_sent_again(monkeypatch):
    def ignore_one():
        Dropped(lambda: signal.raise_signal(number))
        time.sleep(5)

    others = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    for number, other in [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]:
        # A shell lets what it starts by `&` ignore SIGINT.
        handlers = {number: signal.default_int_handler, other: signal.SIG_IGN}
        earlier = {each: signal.signal(each, handler) for each, handler in handlers.items()}
        try:
            with pytest.raises(KeyboardInterrupt), insistent(number=number):
                ignore_one()
        finally:
            for each, handler in earlier.items():
                signal.signal(each, handler)
    with insistent():
        Dropped(lambda: {}["absent"])
    assert [each.exc_type for each in others] == [KeyError]


def test_an_interrupt_where_a_class_names_its_attributes_is_one():
    class Field:
        def __set_name__(self, *_):
            raise self.error

    def define(error):
        Field.error = error
        type("Class", (), {"field": Field()})

    with pytest.raises(KeyboardInterrupt), insistent():
        define(KeyboardInterrupt())
    with pytest.raises((KeyError, RuntimeError)) as other, insistent():
        define(KeyError())
    assert isinstance(other.value.__cause__ or other.value, KeyError)
