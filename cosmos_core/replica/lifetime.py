"""The lifetime of a process of a run: it ends with its parent and on SIGTERM, and outlives Ctrl-C.

The terminal sends Ctrl-C to every process of the run; only the supervisor acts on it. SIGTERM, or the parent's end,
sets a stop event; a process that does not leave in time is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_LOG: Final = logging.getLogger(__name__)

PARENT: Final = "COSMOS_PARENT_PID"
"""Variable with the process id of who started this process, who may end before this process can ask who it is."""

LOST: Final = os.EX_TEMPFAIL
"""Exit code of a replica's process that ends though nothing is wrong with the run: another one can take its place."""
REFUSED: Final = os.EX_NOPERM
"""Exit code of one that the controller does not want, and would not want another one in its place either."""

_PR_SET_PDEATHSIG: Final = 1
_PARENT_CHECK_S: Final = 1.0


@contextlib.contextmanager
def bounded_life(stop: threading.Event, *, grace_s: float = 5.0) -> Iterator[None]:
    """Ignore SIGINT, and set `stop` on SIGTERM or when the parent process ends.

    `grace_s` seconds after `stop` was set by one of these, a process that is still inside ends with code 143, whatever
    its main thread is stuck in. Call it from the main thread. The parent's thread that started this process counts as
    its parent: a launcher must start processes from a thread that lives as long as the run, and tells them its number
    in `PARENT`, which is taken out of the environment here.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    die_with_parent(signal.SIGTERM)
    # The interpreter writes the number of each signal to the descriptor at once, even while the main thread is inside
    # a long call into C and cannot run a Python handler.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(reader, parent, stop, grace_s), name="lifetime", daemon=True)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_to_watcher)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        watcher.join()
        reader.close()


def call_later(seconds: float, call: Callable[[], object]) -> None:
    """Call something on a thread of its own after a while, unless the process has ended by then."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """Exists so that the signal does not end the process."""


def die_with_parent(number: signal.Signals) -> None:
    """Get this signal when the thread that started this process ends; other kernels than Linux do nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def _watch(reader: socket.socket, parent: int, stop: threading.Event, grace_s: float) -> None:
    """Run until the other end of `reader` is closed."""
    reader.settimeout(_PARENT_CHECK_S)
    give_up_at = float("inf")
    while True:
        try:
            received = reader.recv(64)
            if not received:
                return
            reason = "SIGTERM" if signal.SIGTERM in received else ""
        except TimeoutError:
            reason = "" if os.getppid() == parent else f"the end of the parent process {parent}"
        now = time.monotonic()
        if reason and give_up_at == float("inf"):
            _LOG.info("stopping because of %s", reason)
            give_up_at = now + grace_s
            reader.settimeout(min(_PARENT_CHECK_S, grace_s))
            stop.set()
        if now >= give_up_at:
            _LOG.error("did not stop within %g s; ending at once", grace_s)
            os._exit(128 + signal.SIGTERM)
