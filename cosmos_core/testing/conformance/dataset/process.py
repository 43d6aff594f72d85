"""Reading rows in another process: `python -m cosmos_core.testing.conformance.dataset.process REQUEST ROWS`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import msgspec

from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetContext
from cosmos_core.testing.conformance.dataset.reading import Place, Rows
from cosmos_core.testing.conformance.elsewhere import ask
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Prompt

_TIMEOUT_S: Final = 120.0


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
    rows = ask(
        "cosmos_core.testing.conformance.dataset.process",
        request,
        list[Prompt],
        timeout_s=_TIMEOUT_S,
        late=f"another process did not read {len(places)} rows in {_TIMEOUT_S:g} s, which this one reads; wait for "
        "nothing in __init__ and row() that only one process can have (a lock, a port)",
        failed="another process could not read the rows that this one reads",
    )
    return dict(zip(places, rows, strict=True))


def as_sent(row: Prompt) -> Prompt:
    """The row as it is once it went to another process."""
    try:
        return msgspec.json.decode(msgspec.json.encode(row), type=Prompt)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        fault(f"{row!r:.200} cannot be sent to another process: {error}; keep to text, numbers, lists and dicts")


def _main(question: Path, answer: Path) -> None:
    request = msgspec.json.decode(question.read_bytes(), type=Request)
    plugins = PluginSet.load([("dataset", request.plugin)])
    context = dataset_context(plugins, request.seed, Path(request.directory))
    dataset: Dataset = plugins.create("dataset", request.plugin, request.options, context)
    answer.write_bytes(msgspec.json.encode([dataset.row(split, index) for split, index in request.places]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
