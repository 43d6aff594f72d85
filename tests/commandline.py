"""The real `cosmos` command in a folder of its own, for tests that run whole jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


class CommandLine:
    """Runs `cosmos` as a process, with the folder as its working directory.

    Args:
        folder: Where runs are made.
        timeout_s: Longest time that one command may take.
    """

    def __init__(self, folder: Path, *, timeout_s: float = 240.0) -> None:
        self.folder = folder
        self.timeout_s = timeout_s

    def start(self, *arguments: str, leads_group: bool = False) -> subprocess.Popen[str]:
        """Start a command; its standard output and error come together in `stdout`.

        Args:
            *arguments: Of `cosmos`.
            leads_group: Whether it leads a process group, and a session, as a job of a shell or a scheduler does.
        """
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cosmos_core.cli", *arguments],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=leads_group,
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end.

        Returns:
            What it printed.

        Raises:
            AssertionError: Its exit code is not `code`; the message is what it printed.
            subprocess.TimeoutExpired: It took longer than `timeout_s`.
        """
        process = self.start(*arguments)
        output = self._output(process)
        if process.returncode != code:
            raise AssertionError(f"cosmos {' '.join(arguments)}: exit code {process.returncode}, not {code}\n{output}")
        return output

    def interrupt_at(self, process: subprocess.Popen[str], path: Path) -> str:
        """Press Ctrl-C once `path` exists, and wait for the end.

        Returns:
            What the command printed.

        Raises:
            AssertionError: The command ended, or `timeout_s` passed, before `path` appeared.
            subprocess.TimeoutExpired: It did not end within `timeout_s` after that.
        """
        deadline = time.monotonic() + self.timeout_s
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"{path} did not appear\n{process.communicate()[0]}")
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return self._output(process)

    def _output(self, process: subprocess.Popen[str]) -> str:
        """Read all that a command prints; one that takes too long is ended, and the error says what it printed."""
        try:
            return process.communicate(timeout=self.timeout_s)[0]
        except subprocess.TimeoutExpired as late:
            process.kill()
            late.add_note(process.communicate()[0])
            raise

    def left_behind(self) -> Sequence[psutil.Process]:
        """Processes that were started in the folder or mention it, whatever their command line says."""
        place = str(self.folder)
        found = psutil.process_iter(["cmdline", "cwd", "status"])
        return [
            process
            for process in found
            if process.pid != os.getpid()
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and (place in " ".join(process.info["cmdline"] or ()) or (process.info["cwd"] or "").startswith(place))
        ]
