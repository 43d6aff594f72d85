"""Slices of canonical tensors: overlap, difference, and splitting into pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cosmos_core.protocols import TensorSlice


def size(piece: TensorSlice) -> int:
    """The number of elements of a slice."""
    return math.prod(piece.shape)


def whole(name: str, shape: tuple[int, ...]) -> TensorSlice:
    """The slice that is the whole tensor."""
    return TensorSlice(name=name, start=(0,) * len(shape), shape=shape)


def overlap(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """The part that two slices of one tensor have in common; None if there is none."""
    start = tuple(map(max, one.start, other.start))
    ends = zip(one.start, one.shape, other.start, other.shape, strict=True)
    shape = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True))
    return TensorSlice(name=one.name, start=start, shape=shape) if all(count > 0 for count in shape) else None


def subtract(piece: TensorSlice, hole: TensorSlice) -> list[TensorSlice]:
    """Disjoint slices that make up `piece` without `hole`, which lies within it."""
    rest: list[TensorSlice] = []
    start, shape = list(piece.start), list(piece.shape)
    for dim, (first, count) in enumerate(zip(hole.start, hole.shape, strict=True)):
        before, after = first - start[dim], start[dim] + shape[dim] - first - count
        if before:
            rest.append(_replaced(piece.name, start, shape, dim, (start[dim], before)))
        if after:
            rest.append(_replaced(piece.name, start, shape, dim, (first + count, after)))
        start[dim], shape[dim] = first, count
    return rest


def without(piece: TensorSlice, other: TensorSlice) -> list[TensorSlice]:
    """Disjoint slices that make up the part of `piece` that another slice of its tensor lacks."""
    common = overlap(piece, other)
    return [piece] if common is None else subtract(piece, common)


def disjoint(held: Sequence[TensorSlice]) -> list[TensorSlice]:
    """The slices that a rank holds, each element once."""
    by_name: dict[str, list[TensorSlice]] = {}
    for piece in held:
        known = by_name.setdefault(piece.name, [])
        rest = [piece]
        for other in known:
            rest = [part for each in rest for part in without(each, other)]
        known.extend(rest)
    return [piece for pieces in by_name.values() for piece in pieces]


def chunks(piece: TensorSlice, limit: int) -> list[TensorSlice]:
    """Split along the outermost dims into slices of at most `limit` elements, which stay contiguous in the tensor."""
    if size(piece) <= limit:
        return [piece]
    dim = next(dim for dim, count in enumerate(piece.shape) if count > 1)
    inner = math.prod(piece.shape[dim + 1 :])
    step = max(1, limit // inner)
    start, shape = list(piece.start), list(piece.shape)
    parts = (
        _replaced(piece.name, start, shape, dim, (piece.start[dim] + offset, min(step, piece.shape[dim] - offset)))
        for offset in range(0, piece.shape[dim], step)
    )
    return [chunk for part in parts for chunk in chunks(part, limit)]


def within(piece: TensorSlice, outer: TensorSlice) -> tuple[slice, ...]:
    """Index of `piece` in an array that holds `outer`, which contains it."""
    places = zip(piece.start, outer.start, piece.shape, strict=True)
    return tuple(slice(first - base, first - base + count) for first, base, count in places)


def contains(outer: TensorSlice, piece: TensorSlice) -> bool:
    """True if `piece` is a slice of the same tensor that lies within `outer`."""
    if outer.name != piece.name or not len(outer.shape) == len(piece.shape) == len(piece.start):
        return False
    bounds = zip(outer.start, outer.shape, piece.start, piece.shape, strict=True)
    return all(a <= b and m >= 0 and b + m <= a + n for a, n, b, m in bounds)


def _replaced(name: str, start: list[int], shape: list[int], dim: int, extent: tuple[int, int]) -> TensorSlice:
    first, count = extent
    return TensorSlice(
        name=name, start=(*start[:dim], first, *start[dim + 1 :]), shape=(*shape[:dim], count, *shape[dim + 1 :])
    )
