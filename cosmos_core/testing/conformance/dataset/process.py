"""Reading rows in another process: `python -m cosmos_core.testing.conformance.dataset.process REQUEST ROWS`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import msgspec

from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetContext
from cosmos_core.testing.conformance.dataset.reading import Place, Rows
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Prompt

_TIMEOUT_S: Final = 120.0
_TAIL: Final = 2000


@attrs.frozen(kw_only=True)
class Request:
    """What to read, with the dataset made as in the process that asks."""

    plugin: str
    options: dict[str, JSON]
    seed: int
    directory: str
    places: list[Place]


def read_elsewhere(plugin: str, options: Mapping[str, JSON], context: DatasetContext, places: Sequence[Place]) -> Rows:
    """Some rows as another process with another hash seed reads them."""
    request = Request(
        plugin=plugin,
        options=dict(options),
        seed=context.seed,
        directory=str(context.directory),
        places=list(places),
    )
    with tempfile.TemporaryDirectory() as folder:
        # Files, not streams: a plugin may print.
        question, answer = Path(folder) / "request.json", Path(folder) / "rows.json"
        question.write_bytes(msgspec.json.encode(request))
        module = "cosmos_core.testing.conformance.dataset.process"
        command = [sys.executable, "-P", "-m", module, str(question), str(answer)]
        variables = {**os.environ, "PYTHONHASHSEED": _another_hash_seed()}
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            fault(
                f"another process did not read {len(places)} rows in {_TIMEOUT_S:g} s, which this one reads; wait for "
                "nothing in __init__ and row() that only one process can have (a lock, a port)"
            )
        if done.returncode != 0 or not answer.exists():
            fault(f"another process could not read the rows that this one reads:\n{done.stderr[-_TAIL:]}")
        rows = msgspec.json.decode(answer.read_bytes(), type=list[Prompt])
    return dict(zip(places, rows, strict=True))


def as_sent(row: Prompt) -> Prompt:
    """The row as it is once it went to another process."""
    try:
        return msgspec.json.decode(msgspec.json.encode(row), type=Prompt)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        fault(f"{row!r:.200} cannot be sent to another process: {error}; keep to text, numbers, lists and dicts")


def _another_hash_seed() -> str:
    return "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"


def _main(question: Path, answer: Path) -> None:
    request = msgspec.json.decode(question.read_bytes(), type=Request)
    context = DatasetContext(seed=request.seed, directory=Path(request.directory))
    plugins = PluginSet.load([("dataset", request.plugin)])
    dataset: Dataset = plugins.create("dataset", request.plugin, request.options, context)
    answer.write_bytes(msgspec.json.encode([dataset.row(split, index) for split, index in request.places]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
