"""An engine's process, as the benchmark that asks it for rounds sees it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

FOLDER = Path(__file__).parents[1]


class EngineProcess:
    """`python -m serving` with one engine; ends with the `with` block, whatever happens.

    Raises:
        RuntimeError: The engine does not start, breaks or takes too long; says what it printed.
    """

    def __init__(self, python: str, name: str, model: str, dtype: str, device: str, *, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [python, "-m", "serving", name, model, dtype, device],
            cwd=FOLDER,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # It holds nothing that outlives it, and some engines' threads would wait for requests.
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._printed.close()

    def serve(self, kind: str, round_number: int) -> dict[str, float]:
        """Serve a round: its seconds, of CPU time and of the wall, and units."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "round": round_number}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def _answer(self) -> str:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise RuntimeError(f"{self._name} gave no answer within {self._timeout_s:g} s{self._tail()}") from None
        if not line:
            raise RuntimeError(f"{self._name} ended with exit code {self._process.wait()}{self._tail()}")
        return line

    def _tail(self) -> str:
        self._printed.seek(0)
        printed = [line.rstrip() for line in self._printed if line.strip()][-15:]
        return "\n".join([f"; the last line that it printed: {printed[-1]}", *printed[:-1]]) if printed else ""
