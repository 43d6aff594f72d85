"""Another process, whose hashes differ: it must make the same of a plugin as this one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, TypeVar

import msgspec

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
