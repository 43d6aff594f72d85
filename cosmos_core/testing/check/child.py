"""A process of the check: what it printed is kept, what it leaves running ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs


@attrs.frozen
class Ended:
    """How a process ended.

    Attributes:
        code: Its exit code; None if it had to be stopped.
        output: What it wrote to standard output and error.
    """

    code: int | None
    output: str


def run(
    module: str, arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> Ended:
    """Run a module of the core in a process of its own.

    Args:
        module: Its full name.
        arguments: What it is given.
        folder: Where it runs; modules there are not on its path.
        environment: Variables to set beside those of this process.
        timeout_s: Longest time that it may take.
    """
    command = [sys.executable, "-P", "-u", "-m", module, *arguments]
    # A file, because a pipe stays open for as long as any process that inherited it.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"))
