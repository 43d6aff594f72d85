"""Processes of tests are forked from one server of the test session, which has imported what they need.

Importing torch and transformers takes each process five seconds. Here the server of `multiprocessing` does it once for
a whole session: a `cosmos` command is its fork, and so is the fork server that a run starts for its own processes.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker, util
from pathlib import Path
from typing import IO, Any, Final

import psutil

from cosmos_core.run.interrupts import WATCHED
from tests.commandline import CommandLine

PRELOADED: Final = (
    "tests.preload",
    "cosmos_core.cli.application",
    "cosmos_core.cli.main",
    "cosmos_core.control.__main__",
    "cosmos_core.policy.__main__",
    "cosmos_core.rollout.__main__",
    "cosmos_core.run.command",
)
"""What takes the time."""


class Forked:
    """A fork of the server that became `python -P -m MODULE`, used like a `subprocess.Popen`.

    Args:
        module: The module that it runs.
        arguments: Its command line.
        cwd: Its working directory.
        environment: Its whole environment.
        output: Where its standard output and error go; by default the pipe `stdout`.
        leads_group: Whether it leads a session of its own.
        forks_servers: Whether the fork servers that it starts are its forks, rather than interpreters with hashes of
            their own.

    Attributes:
        args: The module and its arguments.
        pid: Its process id.
        stdout: What it prints, as it comes.
        returncode: Its exit code, negative for a signal, once somebody has waited for it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        output: Path | None = None,
        leads_group: bool = False,
        forks_servers: bool = True,
    ) -> None:
        self.args: Final = [module, *arguments]
        self.returncode: int | None = None
        reading, writing = (
            os.pipe() if output is None else (os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY))
        )
        self.stdout: Final = os.fdopen(reading, encoding="utf-8")
        self._text = ""
        self._reader: threading.Thread | None = None
        try:
            self._process = context().Process(
                target=_become,
                kwargs={
                    "module": module,
                    "arguments": list(arguments),
                    "cwd": str(cwd),
                    "environment": dict(environment),
                    "output": _Passed(writing),
                    "leads_group": leads_group,
                    "forks_servers": forks_servers,
                },
            )
            self._process.start()
        finally:
            os.close(writing)
        assert self._process.pid is not None
        self.pid: Final = self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it by force."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it prints to its end."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return self._text, None

    def _read(self) -> None:
        with self.stdout:
            self._text = self.stdout.read()


class ForkedCommandLine(CommandLine):
    """Runs `cosmos` as a fork, with the folder as its working directory."""

    def start(self, *arguments: str, leads_group: bool = False) -> Any:
        """Start a command; its standard output and error come together in `stdout`."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
        return Forked("cosmos_core.cli", arguments, cwd=self.folder, environment=environment, leads_group=leads_group)

    def left_behind(self) -> Sequence[psutil.Process]:
        """Processes that are still there a while later: a run's fork server ends as soon as its starter has."""
        until = time.monotonic() + 5.0
        while True:
            # The session's server was told of the places that modules were imported from when it began.
            left = [each for each in super().left_behind() if each.pid != forkserver._forkserver._forkserver_pid]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)


def forked(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[bytes], **_: object) -> Forked:
    """Start `python -P -u -m MODULE …` as a fork that leads a session, in the place of `subprocess.Popen`."""
    _, *flags, module = command[:5]
    assert flags == ["-P", "-u", "-m"]
    output = Path(f"/proc/self/fd/{stdout.fileno()}")
    found = Forked(module, command[5:], cwd=cwd, environment=env, output=output, leads_group=True, forks_servers=False)
    found.stdout.close()
    return found


def context() -> multiprocessing.context.ForkServerContext:
    """The server's; it starts with the first process."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOADED))
    return found


class _Passed:
    """A file descriptor that goes to the fork."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (reduction.DupFd(self.number),)


def _received(passed: Any) -> int:
    return passed.detach()


def _become(
    *,
    module: str,
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    output: Any,
    leads_group: bool,
    forks_servers: bool,
) -> None:
    """Become what `python -P -m` would have made."""
    _forget_the_server(os.close)
    for number, handler in zip(WATCHED, (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL), strict=True):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    if leads_group:
        os.setsid()
    os.chdir(cwd)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    seed = os.environ.get("PYTHONHASHSEED", "random")
    os.environ.clear()
    os.environ.update(environment)
    if not forks_servers:
        # Hashes are the server's, whatever the environment says; worlds and kits choose others than these.
        os.environ["PYTHONHASHSEED"] = seed
    sys.path[:] = [place for place in sys.path if place not in ("", cwd)]
    added = environment.get("PYTHONPATH", "")
    sys.path[:0] = [place for place in added.split(os.pathsep) if place and place not in sys.path]
    importlib.invalidate_caches()
    if forks_servers:
        util.spawnv_passfds = _spawned_by_forking
    sys.argv = [module, *arguments]
    sys.modules.pop(f"{module}.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _forget_the_server(close: Callable[[int], object]) -> None:
    """What this process forks from a server, it forks from one of its own, which ends with it."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        close(server._forkserver_alive_fd)
    server.__init__()


_spawnv: Final = util.spawnv_passfds


def _spawned_by_forking(path: Any, args: Sequence[str], passed: Sequence[int]) -> int:
    """Stand in for the start of a new interpreter: a fork server of a process that has all imported is its fork."""
    if "multiprocessing.forkserver import main" not in args[-1]:
        return _spawnv(path, args, passed)
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number not in passed:
                with contextlib.suppress(OSError):
                    os.close(number)
        _forget_the_server(lambda _: None)
        resource_tracker._resource_tracker.__init__()
        threading._after_fork()
        exec(args[-1], {})
    finally:
        os._exit(1)
