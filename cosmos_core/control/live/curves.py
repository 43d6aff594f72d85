"""Curves of bounded length, whatever the length of the run."""

from __future__ import annotations

import math
from typing import Final

import attrs

MOST_POINTS: Final = 512
"""Of one curve; even, because neighbours are merged in pairs."""

Point = tuple[float, float]


@attrs.frozen(kw_only=True)
class Curve:
    """A curve as it was at one moment: (step, value), steps ascending."""

    name: str
    points: tuple[Point, ...]


class Trace:
    """A curve that grows: when it is full, neighbours are averaged, so that noise stays honest.

    Args:
        name: What it shows.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self._points: list[Point] = []
        self._stride = 1
        self._part: list[Point] = []

    def __len__(self) -> int:
        """Number of its points."""
        return len(self._points) + bool(self._part)

    def add(self, step: float, value: float | None) -> None:
        """Add a point; what is no finite number is left out."""
        if value is None or not math.isfinite(value):
            return
        self._part.append((step, value))
        if len(self._part) == self._stride:
            self._points.append(_mean(self._part))
            self._part.clear()
        if len(self._points) == MOST_POINTS:
            self._points = [_mean(self._points[first : first + 2]) for first in range(0, MOST_POINTS, 2)]
            self._stride *= 2

    def clear(self) -> None:
        """Forget all points."""
        self._points.clear()
        self._part.clear()
        self._stride = 1

    def curve(self) -> Curve:
        """The curve as it is now, the newest points included."""
        newest = (_mean(self._part),) if self._part else ()
        return Curve(name=self.name, points=(*self._points, *newest))


def _mean(points: list[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
