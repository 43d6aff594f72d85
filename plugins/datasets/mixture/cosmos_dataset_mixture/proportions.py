"""The number of rows of each part in an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal


def shares(weights: Sequence[float]) -> list[Fraction]:
    """The weights as exact shares of 1: 0.1 is a tenth."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def rows_of_epoch(
    sizes: Sequence[int], weights: Sequence[float], epoch: Literal["longest", "shortest"]
) -> tuple[int, ...]:
    """Rows that an epoch has of each part: as its share says, to within one row.

    Args:
        sizes: Rows of each part, 1 or more.
        weights: Of each part, above 0.
        epoch: `longest`: each part has its size or more. `shortest`: each part has its size or fewer.

    Returns:
        A count for each part, by the method of largest remainders; of equal remainders the earlier part's counts.
    """
    parts = shares(weights)
    lengths = [size / share for size, share in zip(sizes, parts, strict=True)]
    total = math.ceil(max(lengths)) if epoch == "longest" else math.floor(min(lengths))
    exact = [share * total for share in parts]
    counts = [math.floor(count) for count in exact]
    by_remainder = sorted(range(len(parts)), key=lambda part: (counts[part] - exact[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return tuple(counts)
