"""The records of a run's steps in bounded memory: the newest ones all, of earlier ones an even sample.

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


T = TypeVar("T", bound=OfStep)


def add(records: list[T], record: T) -> None:
    """Add the record of the next step, and leave out as many earlier ones as there is no room for."""
    records.append(record)
    if len(records) <= MOST:
        return
    earlier, stride = records[:-NEWEST], 1
    while len(earlier) > (MOST - NEWEST) // 2:
        stride *= 2
        earlier = [each for each in earlier if each.step % stride == 0]
    records[:-NEWEST] = earlier


def after(records: Sequence[T], step: int) -> list[T]:
    """The records of later steps, in order."""
    return list(itertools.takewhile(lambda each: each.step > step, reversed(records)))[::-1]


def undo(records: list[T], step: int) -> None:
    """Remove the records of later steps."""
    del records[len(records) - len(after(records, step)) :]
