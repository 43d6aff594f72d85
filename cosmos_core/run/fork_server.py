"""Begins the fork server of a run and ends it: a process that has imported what all processes of the run need.

Importing torch and transformers takes each process seconds, more than all else that it does before it works. The fork
server does it once. Its first fork plans the run; a replica that is started again is at work at once. It is a process
of its own, forked from nothing, which imports and does nothing else: no thread, no socket, no device. Its forks end
with it, so it minds no signal that is sent to all processes of a terminal or a job; it ends with its starter. Where
there are GPUs it is not used, since some import might touch one, and what has touched a GPU cannot be forked.

A command begins it before all else. So this module imports little: the processes are started by `run.launch.forks`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

from cosmos_core.devices import num_threads, visible_gpus
from cosmos_core.errors import ReplicaError, told_as
from cosmos_core.run.interrupts import WATCHED
from cosmos_core.scratch import scratch

PRELOADED: Final = ("cosmos_core.run.preload", "cosmos_core.run.planning.plan", "cosmos_core.run.plan")
"""What takes the time, and planning needs; `preload` imports the rest after the first fork."""

UNKNOWN: Final = 255
"""What multiprocessing says of a process whose fork server has ended, which ends it, too."""

_SERVER: Final[Any] = forkserver._forkserver  # noqa: SLF001 - multiprocessing has no other way
_IMPORTS_S: Final = 180.0
"""Longer than its imports take on a busy machine, before which it does not answer."""
_ANSWER_S: Final = 10.0
_ANSWERED: Final[set[int | None]] = set()
"""Fork servers that have answered, so that their imports are done."""
_BORROWED: Final[set[int | None]] = set()
"""Fork servers of other processes, which end them."""
_THREADS: Final[dict[int | None, int]] = {}
"""Threads that a fork server was begun with."""
_LONGEST: Final = 45


def begin_early() -> None:
    """Begin one as most recipes want it, before the recipe is read; what hinders it is told where it is needed."""
    with contextlib.suppress(ReplicaError):
        prepare(num_threads())


def prepare(threads: int) -> bool:
    """Begin to import, and return at once; whether it does, which is so unless there are GPUs.

    `threads` of numeric libraries, which read it as they are loaded. One that nobody has used yet and that was begun
    with others is ended first. A ReplicaError says what hinders it.
    """
    if visible_gpus():
        return False
    if (pid := _pid()) in _BORROWED:
        return True
    if pid not in _ANSWERED and _THREADS.get(pid, threads) != threads:
        end()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}
    # It inherits what is held back, from its first moment, and holds it back for good.
    mask, tempdir = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED), tempfile.tempdir
    before = {name: os.environ[name] for name in environment.keys() & os.environ.keys()}
    try:
        os.environ.update(environment)
        with told_as(ReplicaError, "the fork server could not begin"):
            resource_tracker.ensure_running()
            # That has let some through again.
            signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
            # The path of a socket has 107 characters at most, of which names take 62.
            parent = "/tmp" if len(tempfile.gettempdir()) > _LONGEST else tempfile.gettempdir()  # noqa: S108
            with told_as(ReplicaError, f"the fork server could not begin; it has a socket in {parent}"):
                tempfile.tempdir = str(_folder(parent))
                forkserver.ensure_running()
    finally:
        tempfile.tempdir = tempdir
        for name in environment.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _THREADS.setdefault(_pid(), threads)
    return True


def end() -> None:
    """End the one that was begun here, if any, and its forks with it."""
    if _pid() not in _BORROWED:
        _kill()
        _SERVER._stop()  # noqa: SLF001


def leave() -> None:
    """Let go of it in a fork: it ends with its starter, and lives while anyone has the pipe to it."""
    _settle()
    os.close(_SERVER._forkserver_alive_fd)  # noqa: SLF001
    _SERVER._forkserver_alive_fd = _SERVER._forkserver_pid = _SERVER._forkserver_address = None  # noqa: SLF001


def place() -> tuple[str, int] | None:
    """Address and process id of the fork server; None unless it runs."""
    if (pid := _pid()) is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return None
    return _SERVER._forkserver_address, pid  # noqa: SLF001


def borrow(found: tuple[str, int] | None) -> None:
    """Use the fork server that another process began, at its `place`, if any, in a fork of it that ends with it."""
    _settle()
    _SERVER._forkserver_address, _SERVER._forkserver_pid = found or (None, None)  # noqa: SLF001
    if found is not None:
        _BORROWED.add(found[1])
        # It cannot be waited for, as another process's child.
        _SERVER.ensure_running = forkserver.ensure_running = lambda: None


def _settle() -> None:
    """Undo in a fork what the fork server does for itself: it holds signals back, and looks for no garbage."""
    for number in WATCHED:
        # What has come was sent to the whole group, which its starter answers.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    # What was imported stays: it is no garbage, and looking at it would copy its pages.
    gc.freeze()
    gc.enable()


@functools.cache
def _folder(parent: str) -> Path:
    """The place of multiprocessing's sockets, which does not stay if this process is killed."""
    stack = contextlib.ExitStack()
    # After multiprocessing has removed what it put there.
    Finalize(None, stack.close, exitpriority=-200)
    folder = stack.enter_context(scratch("forks", parent))
    # To tear down all that it has imported takes it two seconds, for which this process would wait.
    stack.callback(_kill)
    return folder


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """End a fork server that does not answer meanwhile, as it was stopped: this process would wait for ever."""
    pid = _pid()
    timer = threading.Timer(_ANSWER_S if pid in _ANSWERED else _IMPORTS_S, _kill)
    timer.start()
    try:
        yield
        _ANSWERED.add(_pid())
    finally:
        timer.cancel()


def _pid() -> int | None:
    pid: int | None = _SERVER._forkserver_pid  # noqa: SLF001
    return pid


def _kill() -> None:
    if (pid := _pid()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
