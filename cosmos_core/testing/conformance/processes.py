"""Other processes: one with another hash seed to ask, and those that a worker started and did not end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import attrs
import msgspec
import psutil
import pytest

from cosmos_core.testing.conformance.plugin import fault

T = TypeVar("T")
_TAIL: Final = 2000


def ask(module: str, question: object, answer: type[T], *, timeout_s: float, late: str, failed: str) -> T:
    """Run `python -m module QUESTION ANSWER` with another hash seed, and read its answer.

    Args:
        module: Reads the question from the first file, and writes the answer to the second; both are JSON.
        question: What the first file holds.
        answer: Type of what the second file holds.
        timeout_s: Longest time that it may take.
        late: What to tell the author if it takes longer.
        failed: What to tell the author if it fails; the end of its errors is added.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Files, not streams: a plugin may print.
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_bytes(msgspec.json.encode(question))
        command = [sys.executable, "-P", "-m", module, str(asked), str(answered)]
        variables = {**os.environ, "PYTHONHASHSEED": _another_hash_seed(), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            fault(late)
        if done.returncode != 0 or not answered.exists():
            fault(f"{failed}:\n{done.stderr.strip()[-_TAIL:]}")
        return msgspec.json.decode(answered.read_bytes(), type=answer)


def _another_hash_seed() -> str:
    return "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"


_MARK: Final = "COSMOS_CONFORMANCE_RUN"
_LEAVE_S: Final = 3.0


@attrs.define(kw_only=True, eq=False)
class Marked:
    """Workers that carry a mark.

    Attributes:
        leftovers: Command lines of what outlived them, once they are gone.
    """

    leftovers: tuple[str, ...] = ()


@contextlib.contextmanager
def marked(hash_seed: str) -> Iterator[Marked]:
    """Mark the workers that are started within, and end what they leave behind.

    Args:
        hash_seed: `PYTHONHASHSEED` of the workers.
    """
    mark, found = uuid.uuid4().hex, Marked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, mark)
        patch.setenv("PYTHONHASHSEED", hash_seed)
        yield found
    found.leftovers = tuple(_ended(mark))


def _ended(mark: str) -> Iterator[str]:
    _, alive = psutil.wait_procs([each for each in psutil.process_iter() if _carries(each, mark)], timeout=_LEAVE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline()) or process.name()
            process.kill()
            yield name


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
