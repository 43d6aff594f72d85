"""Reading rows as a run does: by split and number, in the order of a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import attrs

from cosmos_core.config.order import row_of
from cosmos_core.protocols import Dataset, Split
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Prompt

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
    """What a model and a reward see of a row: two rows of one content are one row read twice."""
    return repr((row.text, row.demonstration, row.rejected, row.reference, row.media))


def compare(first: Mapping[Place, Prompt], second: Mapping[Place, Prompt], when: str, advice: str = PURE) -> None:
    """Fault the first row that is another one the second time.

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
            fault(f"row {index} of {split} is another one {when}: its {name} is {values}; {advice}")
