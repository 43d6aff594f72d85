"""Starts processes of this machine in a fraction of a second, as forks of the fork server."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import select
import signal
import sys
import time
import weakref
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

from cosmos_core.errors import ReplicaError
from cosmos_core.protocols import ProcessSpec
from cosmos_core.replica.lifetime import PARENT
from cosmos_core.run import fork_server

_BEGIN_S: Final = 5.0


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
        if code != fork_server.UNKNOWN:
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
        while (code := self.poll()) is None and time.monotonic() < until:
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # Before it has a session of its own it ignores signals.
                until = time.monotonic() + _BEGIN_S
                while os.getsid(self.pid) != self.pid and time.monotonic() < until:
                    time.sleep(0.005)
                os.kill(self.pid, number)


def start(spec: ProcessSpec, output: Path, *, threads: int = 1) -> Child:
    """Start `python -P -m` as a fork, in a session of its own; a ReplicaError if it cannot be.

    A server that was killed is begun again, with `threads` of numeric libraries, as is one that does not answer.
    """
    arguments = (spec.module, spec.arguments, {**os.environ, **spec.environment}, str(output))
    for may_try_again in (True, False):
        fork_server.prepare(threads)
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=arguments)
        try:
            with fork_server.patience():
                process.start()
            break
        except (OSError, EOFError) as error:
            # The server has ended since this process looked.
            if not may_try_again:
                raise ReplicaError(f"{spec.name} could not be started as a fork: {error}") from error
    return Child(process)


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    """Become the process: what `python -m` would have made."""
    fork_server.leave()
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
