"""Starts processes of this machine in a fraction of a second: forks of one that has imported what they all need.

Importing torch and transformers takes each process seconds, more than all else that it does before it works. The fork
server does it once. Its first fork plans the run; a replica that is started again is at work at once. It is a process
of its own, forked from nothing, which imports and does nothing else: no thread, no socket, no device. Its forks end
with it, so it minds no signal that is sent to all processes of a terminal or a job; it ends with its starter. Where
there are GPUs it is not used, since some import might touch one, and what has touched a GPU cannot be forked.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

from cosmos_core.errors import ReplicaError
from cosmos_core.protocols import ProcessSpec
from cosmos_core.replica.lifetime import PARENT
from cosmos_core.run.launch.local import Process, by_command, visible_gpus
from cosmos_core.storage.scratch import scratch

UNKNOWN: Final = 255
"""What multiprocessing says of a process whose fork server has ended, which ends it, too."""

_IMPORTS_S: Final = 180.0
"""Longer than its imports take on a busy machine, before which it does not answer."""
_ANSWER_S: Final = 10.0
_ANSWERED: Final[set[int | None]] = set()
"""Fork servers that have answered, so that their imports are done."""
_BORROWED: Final[set[int | None]] = set()
"""Fork servers of other processes, which end them."""
_BEGIN_S: Final = 5.0
_POLL_S: Final = 0.02
_LAST: Final = -200
_OF_GROUPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal, `timeout` or a scheduler sends to a whole group of processes: the starter answers it."""

PRELOADED: Final = ("cosmos_core.policy.__main__", "cosmos_core.rollout.__main__")
"""What takes the time."""
_UNCOLLECTED: Final = "cosmos_core.run.launch.uncollected"
"""Imported first: no garbage is looked for until a fork has begun, which saves a fifth of that time."""


class Child:
    """A process of the fork server, used like a `subprocess.Popen`; it leads the session of its `pid`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process: Final = process
        assert process.pid is not None, "it was started"
        self.pid: Final = process.pid
        # A descriptor that can be read once the process has ended.
        self._life: int | None = None
        # It may have ended already, and its fork server have seen to it.
        with contextlib.suppress(ProcessLookupError):
            self._life = os.pidfd_open(process.pid)
            weakref.finalize(self, os.close, self._life)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code = self._process.exitcode
        if code != UNKNOWN:
            return code
        # Its fork server was killed. It would leave in a few seconds, and holds until then what its successor needs.
        if self._life is not None and not select.select([self._life], [], [], 0.0)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            return None
        return -signal.SIGKILL

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; its exit code, or None after `timeout` seconds."""
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        self._process.join(timeout)
        while (code := self.poll()) is None and self._process.exitcode == UNKNOWN and time.monotonic() < until:
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # Before it has a session of its own it ignores signals, as its fork server does.
                until = time.monotonic() + _BEGIN_S
                while os.getsid(self.pid) != self.pid and time.monotonic() < until:
                    time.sleep(0.005)
                os.kill(self.pid, number)


def prepare(threads: int) -> bool:
    """Begin to import, and return at once; whether it does, which is so unless there are GPUs.

    `threads` of numeric libraries, which read it as they are loaded.
    """
    if visible_gpus():
        return False
    if _pid() in _BORROWED:
        return True
    _context()
    # It inherits what is ignored, from its first moment; for as long as that takes, this process ignores it, too.
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in _OF_GROUPS]
    tempdir, tempfile.tempdir = tempfile.tempdir, str(_folder())
    try:
        with _environment({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}):
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = tempdir
        for number, handler in before:
            signal.signal(number, handler)
    return True


def place() -> tuple[str, int] | None:
    """Address and process id of the fork server; None unless it runs."""
    server: Any = forkserver._forkserver  # noqa: SLF001 - multiprocessing has no other way
    return (server._forkserver_address, server._forkserver_pid) if _is_there() else None  # noqa: SLF001


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
    folder = stack.enter_context(scratch("forks"))
    # To tear down all that it has imported takes it two seconds, for which this process would wait.
    stack.callback(_kill)
    return folder


def start(spec: ProcessSpec, output: Path, *, threads: int = 1) -> Process:
    """Start `python -P -m` as a fork, in a session of its own; a ReplicaError if it cannot be.

    A server that was killed is begun again, with `threads` of numeric libraries, as is one that does not answer. What
    it does not preload starts by a command meanwhile.
    """
    if not _is_there():
        prepare(threads)
        if f"{spec.module}.__main__" not in PRELOADED:
            return by_command()(spec, output)
    environment = {**os.environ, **spec.environment}

    def fork() -> Child:
        process = _context().Process(target=_run, args=(spec.module, spec.arguments, environment, str(output)))
        with patience():
            process.start()
        return Child(process)

    try:
        return fork()
    except (OSError, EOFError):
        # The server has ended since this process looked.
        prepare(threads)
    try:
        return fork()
    except (OSError, EOFError) as error:
        raise ReplicaError(f"{spec.name} could not be started as a fork: {error}") from error


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


def _is_there() -> bool:
    """Tell whether the fork server runs."""
    pid = _pid()
    return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_UNCOLLECTED, *PRELOADED])
    return context


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


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    """Become the process: what `python -m` would have made."""
    # The fork server ends with its starter, and its forks with it: it lives while anyone has the pipe to it.
    server: Any = forkserver._forkserver  # noqa: SLF001 - multiprocessing has no other way
    os.close(server._forkserver_alive_fd)  # noqa: SLF001
    server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None  # noqa: SLF001
    # What was imported stays: it is no garbage, and looking at it would copy its pages.
    gc.freeze()
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment, **{PARENT: str(os.getppid())})
    sys.argv = [module, *arguments]
    # It is imported already, under a name of its own.
    sys.modules.pop(f"{module}.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
