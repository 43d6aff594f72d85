"""The records of a run's steps in bounded memory: all of the newest, and of each stage an even sample of earlier ones.

What is counted over all steps is in the totals of each stage (`records.StageTotals`); records are for curves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

NEWEST: Final = 500
"""Records that are all kept."""
MOST: Final = 2000
"""Records that are kept at most."""


class OfStep(Protocol):
    """A record of one step."""

    @property
    def step(self) -> int:
        """The step's number."""

    @property
    def stage(self) -> int:
        """The number of its stage."""


T = TypeVar("T", bound=OfStep)


def add(records: list[T], record: T) -> None:
    """Add the record of the next step, and leave out as many earlier ones as there is no room for."""
    records.append(record)
    if len(records) <= MOST:
        return
    stages = [list(group) for _, group in itertools.groupby(records[:-NEWEST], key=lambda each: each.stage)]
    most = (MOST - NEWEST) // 2 // len(stages)
    records[:-NEWEST] = itertools.chain.from_iterable(_thinned(stage, most) for stage in stages)


def _thinned(stage: list[T], most: int) -> list[T]:
    """The first and the last record, and of those between every second, fourth, ... step."""
    inner, stride = stage[1:-1], 1
    while len(inner) > most:
        stride *= 2
        inner = [each for each in inner if each.step % stride == 0]
    return [*stage[:1], *inner, *stage[-1:][: len(stage) - 1]]


def after(records: Sequence[T], step: int) -> list[T]:
    """The records of later steps, in order."""
    return list(itertools.takewhile(lambda each: each.step > step, reversed(records)))[::-1]


def undo(records: list[T], step: int) -> None:
    """Remove the records of later steps."""
    del records[len(records) - len(after(records, step)) :]
