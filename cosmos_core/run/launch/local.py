"""Every process on this machine, each in a session of its own.

A session of its own keeps the terminal's Ctrl-C from the replicas: only the supervisor gets it, and coordinates.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from cosmos_core.errors import ReplicaError
from cosmos_core.protocols import Exit, ProcessSpec
from cosmos_core.replica.lifetime import PARENT

if TYPE_CHECKING:
    from cosmos_core.run.launch.forks import Child

_POLL_S: Final = 0.02
_TAIL_BYTES: Final = 16_384
_SUFFIXES: Final = (".jsonl", ".log")
_SILENT: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def thread_environment(threads: int) -> dict[str, str]:
    """Environment that bounds the CPU threads of a process's numeric libraries."""
    return {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


def python_command(spec: ProcessSpec) -> list[str]:
    """The command line of a process: `python -P -m`, which imports nothing from the folder it is started in."""
    return [sys.executable, "-P", "-m", spec.module, *spec.arguments]


Process: TypeAlias = "subprocess.Popen[bytes] | Child"
"""A process that was started here, the leader of a session of its own."""
Begin: TypeAlias = Callable[[ProcessSpec, Path], Process]
"""Starts a process whose output is appended to a file; raises `ReplicaError`."""


def by_command(command: Callable[[ProcessSpec], list[str]] = python_command) -> Begin:
    """Start processes by a command line."""

    def begin(spec: ProcessSpec, output: Path) -> Process:
        words = command(spec)
        # Other commands start it elsewhere, where this process is not its parent.
        parent = {PARENT: str(os.getpid())} if words[0] == sys.executable else {}
        try:
            with output.open("ab") as file:
                return subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.environment, **parent},
                    start_new_session=True,
                )
        except OSError as error:
            raise ReplicaError(f"{spec.name} could not be started ({' '.join(words)}): {error}") from error

    return begin


class LocalLauncher:
    """Starts processes on this machine by `begin`; their output goes to `<logs>/<name>.log`."""

    def __init__(self, logs: Path, begin: Begin | None = None) -> None:
        self._logs: Final = logs
        self._begin: Final = by_command() if begin is None else begin
        self._processes: Final[dict[str, Process]] = {}
        self._ended: Final[set[str]] = set()
        self._written: Final[dict[str, dict[str, int]]] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Start a process; raises ReplicaError if the system refused."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._written[spec.name] = {suffix: _size(self._logs / f"{spec.name}{suffix}") for suffix in _SUFFIXES}
        self._processes[spec.name] = self._begin(spec, self._logs / f"{spec.name}.log")
        self._ended.discard(spec.name)

    def running(self) -> Sequence[str]:
        """Names of the processes that have not ended."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call; what they left in their session is killed."""
        found = []
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and name not in self._ended:
                self._ended.add(name)
                _signal_session(process, signal.SIGKILL)
                # One that was killed from outside said nothing of it.
                error = last_error(self._logs, name, self._written[name]) if code not in _SILENT else ""
                found.append(Exit(name=name, code=code, error=error))
        return found

    def kill(self, name: str) -> None:
        """Kill a process and whatever it started; stopped ones, too."""
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            _signal_session(process, signal.SIGKILL)

    def terminate(self, name: str) -> None:
        """Ask one process to end; returns at once."""
        if (process := self._processes.get(name)) is not None:
            process.send_signal(signal.SIGTERM)

    def check(self) -> None:
        """Processes can be started on this machine."""

    def signal_stop(self) -> None:
        """Ask every process to end; returns at once."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        """End every process and whatever it started: TERM first, KILL after `grace_s`."""
        self.signal_stop()
        deadline = time.monotonic() + grace_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for name, process in self._processes.items():
            if name not in self._ended:
                self._ended.add(name)
                _signal_session(process, signal.SIGKILL)
                process.wait()


def _signal_session(process: Process, number: signal.Signals) -> None:
    """Signal a process and its children, which share its process group (it leads a session of its own)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def last_error(logs: Path, name: str, written: Mapping[str, int] | None = None) -> str:
    """The last error that a process logged in the folder `logs`, else the end of its output; empty if it said nothing.

    `written` are the bytes of its `.jsonl` and its `.log` that others of its name had written before it began.
    """
    skip = written or {}
    for line in reversed(_tail(logs / f"{name}.jsonl", skip.get(".jsonl", 0)).splitlines()):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by the tail, or by the process's death
        if entry.get("level") in ("ERROR", "CRITICAL"):
            return str(entry.get("message", ""))
    lines = [line for line in _tail(logs / f"{name}.log", skip.get(".log", 0)).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, skip: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(skip, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
