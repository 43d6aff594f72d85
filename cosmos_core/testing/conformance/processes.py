"""Other processes: one with another hash seed to ask, and those that a worker started and did not end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil
import pytest

T = TypeVar("T")
_MARK: Final = "COSMOS_CONFORMANCE_RUN"
_LEAVE_S: Final = 3.0


def exchange(
    module: str,
    question: object,
    answer: type[T],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> tuple[T | None, int | None, str]:
    """Run `python -m module QUESTION ANSWER`, which reads the first file and writes the second, both JSON.

    Files, not streams: a plugin may print. The process ends with what it leaves running once `timeout_s` have passed.
    `environment` is set beside the variables of this process; it runs in `folder` (by default an empty one), whose
    modules are not on its path.

    Returns:
        The answer (None if it wrote none), its exit code (None if it had to be stopped), and its output.
    """
    with tempfile.TemporaryDirectory(prefix="cosmos-") as scratch, tempfile.TemporaryFile() as output:
        asked, answered = Path(scratch) / "question.json", Path(scratch) / "answer.json"
        asked.write_bytes(msgspec.json.encode(question))
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", module, str(asked), str(answered)],
            cwd=folder or scratch,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            # A file, because a pipe stays open for as long as any process that inherited it.
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
        found = msgspec.json.decode(answered.read_bytes(), type=answer) if answered.exists() else None
        return found, code, output.read().decode(errors="replace")


@contextlib.contextmanager
def marked(hash_seed: str) -> Iterator[list[str]]:
    """Mark the workers that are started within, with this `PYTHONHASHSEED`, and end what they leave behind.

    Yields command lines of what outlived the workers, filled in once they are gone.
    """
    mark, leftovers = uuid.uuid4().hex, list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, mark)
        patch.setenv("PYTHONHASHSEED", hash_seed)
        yield leftovers
    _, alive = psutil.wait_procs([each for each in psutil.process_iter() if _carries(each, mark)], timeout=_LEAVE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            leftovers.append(" ".join(process.cmdline()) or process.name())
            process.kill()


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
