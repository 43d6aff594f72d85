"""Rows of a dataset as a run reads them, here or in another process.

`python -m cosmos_core.testing.conformance.rows REQUEST ROWS` is that process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import msgspec

from cosmos_core.config.order import row_of
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetContext, Split
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.processes import ask
from cosmos_core.types import JSON, Prompt

Place: TypeAlias = tuple[Split, int]
Rows: TypeAlias = dict[Place, Prompt]

SPLITS: Final[tuple[Split, ...]] = ("train", "heldout")
PURE: Final = "make a row from the options, the seed, the split and the index alone"
_EDGE: Final = 4


def spread(size: int, most: int) -> list[int]:
    """Up to `most` of the numbers in `range(size)`, both ends and what lies evenly between them."""
    if size <= most:
        return list(range(size))
    ends = {*range(_EDGE), *range(size - _EDGE, size)}
    between = most - len(ends)
    return sorted(ends | {_EDGE + index * (size - 2 * _EDGE) // between for index in range(between)})


def places_by_position(positions: Iterable[int], num_rows: int, seed: int) -> list[Place]:
    """The train rows at positions of the first stage of a run, in the order in which it draws them."""
    return [("train", row_of(position, num_rows, seed, 0)[1]) for position in positions]


def read_row(dataset: Dataset, place: Place) -> Prompt:
    """One row, as it is at this moment: a copy, so that later changes to it show."""
    return copy.deepcopy(take_row(dataset, place))


def take_row(dataset: Dataset, place: Place) -> Prompt:
    """One row, the very object."""
    split, index = place
    try:
        row = dataset.row(split, index)
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        size = dataset.size(split)
        fault(f"row({split!r}, {index}) raised {type(error).__name__}: {error}; its size says there are {size} rows")
    if not isinstance(row, Prompt):
        fault(f"row({split!r}, {index}) is a {type(row).__name__}: {row!r:.100}; return a cosmos_core.types.Prompt")
    return row


def read_rows(dataset: Dataset, places: Iterable[Place]) -> Rows:
    """Some rows, in this order."""
    return {place: read_row(dataset, place) for place in places}


def content_of(row: Prompt) -> str:
    """The content of a row that a model and a reward see: two rows of one content are one row read twice."""
    return repr((row.text, row.demonstration, row.rejected, row.reference, row.media))


def difference(first: Rows, second: Rows, when: str, advice: str = PURE) -> str:
    """Tell of the first row that is another one the second time; empty if none is.

    Args:
        first: Rows as they must be.
        second: Some of them as they are the second time.
        when: What the second time was.
        advice: What to do.
    """
    for (split, index), row in second.items():
        expected = first[split, index]
        if row != expected:
            names = [field.name for field in attrs.fields(Prompt)]
            name = next(name for name in names if getattr(row, name) != getattr(expected, name))
            values = f"{getattr(expected, name)!r:.100}, then {getattr(row, name)!r:.100}"
            return f"row {index} of {split} is another one {when}: its {name} is {values}; {advice}"
    return ""


_TIMEOUT_S: Final = 120.0


@attrs.frozen(kw_only=True)
class Request:
    """The rows to read, with the dataset made as in the process that asks."""

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
        "cosmos_core.testing.conformance.rows",
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
