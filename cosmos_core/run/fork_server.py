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
import multiprocessing
import os
import select
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

from cosmos_core.run.gpus import visible_gpus
from cosmos_core.scratch import scratch

PRELOADED: Final = ("cosmos_core.run.preload", "cosmos_core.run.planning.plan", "cosmos_core.run.plan")
"""What takes the time, and planning needs; `preload` imports the rest after the first fork."""

UNKNOWN: Final = 255
"""What multiprocessing says of a process whose fork server has ended, which ends it, too."""

_IMPORTS_S: Final = 180.0
"""Longer than its imports take on a busy machine, before which it does not answer."""
_ANSWER_S: Final = 10.0
_ANSWERED: Final[set[int | None]] = set()
"""Fork servers that have answered, so that their imports are done."""
_BORROWED: Final[set[int | None]] = set()
"""Fork servers of other processes, which end them."""
_THREADS: Final[dict[int | None, int]] = {}
"""Threads that a fork server was begun with."""
_LAST: Final = -200
_LONGEST: Final = 45
OF_GROUPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal, `timeout` or a scheduler sends to a whole group of processes: the starter answers it."""


def begin_early() -> None:
    """Begin one as most recipes want it, before the recipe is read; what hinders it is told where it is needed."""
    with contextlib.suppress(OSError):
        prepare(1)


def prepare(threads: int) -> bool:
    """Begin to import, and return at once; whether it does, which is so unless there are GPUs.

    `threads` of numeric libraries, which read it as they are loaded. One that nobody has used yet and that was begun
    with others is ended first.
    """
    if visible_gpus():
        return False
    if (pid := _pid()) in _BORROWED:
        return True
    if pid not in _ANSWERED and _THREADS.get(pid, threads) != threads:
        end()
    folder = str(_folder())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Not below: it would let through what is held back there.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource_tracker.ensure_running()
    signal.signal(signal.SIGHUP, hangup)
    # It inherits what is ignored, from its first moment; for as long as that takes, this process ignores it, too, and
    # holds back what comes, which Linux keeps even if it is ignored.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_GROUPS)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in OF_GROUPS]
    tempdir, tempfile.tempdir = tempfile.tempdir, folder
    try:
        with _environment({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}):
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = tempdir
        for number, handler in before:
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _THREADS.setdefault(_pid(), threads)
    return True


def end() -> None:
    """End the one that was begun here, if any, and its forks with it."""
    if _pid() not in _BORROWED:
        _kill()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001


def leave() -> None:
    """Let go of it in a fork: it ends with its starter, and lives while anyone has the pipe to it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_GROUPS)
    server: Any = forkserver._forkserver  # noqa: SLF001 - multiprocessing has no other way
    os.close(server._forkserver_alive_fd)  # noqa: SLF001
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None  # noqa: SLF001


def place() -> tuple[str, int] | None:
    """Address and process id of the fork server; None unless it runs."""
    server: Any = forkserver._forkserver  # noqa: SLF001 - multiprocessing has no other way
    return (server._forkserver_address, server._forkserver_pid) if is_there() else None  # noqa: SLF001


def borrow(found: tuple[str, int] | None) -> None:
    """Use a fork server that another process began, at its `place`, if any; begin another if that has ended."""
    server: Any = forkserver._forkserver  # noqa: SLF001
    server._forkserver_address, server._forkserver_pid = found or (None, None)  # noqa: SLF001
    if found is None:
        return
    _BORROWED.add(server._forkserver_pid)  # noqa: SLF001
    ended, begin = os.pidfd_open(server._forkserver_pid), server.ensure_running  # noqa: SLF001

    def ensure_running() -> None:
        if select.select([ended], [], [], 0.0)[0]:
            # Another process's child: it cannot be waited for.
            server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None  # noqa: SLF001
            server.ensure_running = forkserver.ensure_running = begin
            begin()

    server.ensure_running = forkserver.ensure_running = ensure_running


@functools.cache
def _folder() -> Path:
    """The place of multiprocessing's sockets, which does not stay if this process is killed."""
    stack = contextlib.ExitStack()
    # After multiprocessing has removed what it put there.
    Finalize(None, stack.close, exitpriority=_LAST)
    # The path of a socket has 107 characters at most, of which names take 62.
    folder = stack.enter_context(scratch("forks", "/tmp" if len(tempfile.gettempdir()) > _LONGEST else None))  # noqa: S108
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
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # noqa: SLF001
    return pid


def _kill() -> None:
    pid = _pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_there() -> bool:
    """Tell whether the fork server runs."""
    pid = _pid()
    return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set what the fork server inherits; this process's own libraries have read it long ago."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
