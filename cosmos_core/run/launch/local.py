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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cosmos_core.errors import ReplicaError
from cosmos_core.run.launch.launcher import Exit, ProcessSpec

_POLL_S: Final = 0.02
_TAIL_BYTES: Final = 16_384
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def thread_environment(threads: int) -> dict[str, str]:
    """Environment that bounds the CPU threads of a process's numeric libraries."""
    return {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """GPUs of this machine as CUDA names them: those of CUDA_VISIBLE_DEVICES, else all."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    numbers = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia*")]
    return sorted((number for number in numbers if number.isdecimal()), key=int)


class LocalLauncher:
    """Starts processes with `python -P -m`, which imports nothing from the folder it is started in.

    Output goes to `<logs>/<name>.log`.
    """

    def __init__(self, logs: Path) -> None:
        self._logs: Final = logs
        self._processes: Final[dict[str, subprocess.Popen[bytes]]] = {}
        self._ended: Final[set[str]] = set()

    def start(self, spec: ProcessSpec) -> None:
        """Start a process.

        Raises:
            ReplicaError: The system refused.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", spec.module, *spec.arguments]
        try:
            with (self._logs / f"{spec.name}.log").open("ab") as output:
                self._processes[spec.name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise ReplicaError(f"{spec.name} could not be started ({' '.join(command)}): {error}") from error
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
                found.append(Exit(name=name, code=code, error=last_error(self._logs, name) if code else ""))
        return found

    def signal_stop(self) -> None:
        """Ask every process to end; returns at once."""
        for process in self._processes.values():
            if process.poll() is None:
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


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and its children, which share its process group (it leads a session of its own)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def last_error(logs: Path, name: str) -> str:
    """The last error that a process logged, else the end of its output; empty if it said nothing."""
    for line in reversed(_tail(logs / f"{name}.jsonl").splitlines()):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by the tail, or by the process's death
        if entry.get("level") in ("ERROR", "CRITICAL"):
            return str(entry.get("message", ""))
    lines = [line for line in _tail(logs / f"{name}.log").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
