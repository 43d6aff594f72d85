"""What arrived of a version, checked tensor by tensor before any of it is loaded: which one is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import attrs
import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.digest import MODULUS, tensor_digest
from cosmos_core.weights.planning.tables import disjoint
from cosmos_core.weights.shards import EngineLayout, ShardMap

_Boxes: TypeAlias = tuple[TensorSlice, ...]


@attrs.define
class _Part:
    """What a rank got of a tensor: the sum of its digests, and how many elements."""

    digest: int = 0
    count: int = 0


class Arrivals:
    """Adds up, for each rank, the digests of the slices that come for it.

    A tensor is checked by every choice of ranks that need each other to make it up: copies must be equal, and parts add
    up to what was published.
    """

    def __init__(self, published: Mapping[str, int], layout: EngineLayout) -> None:
        """Begin with nothing.

        Args:
            published: Digest of each tensor.
            layout: What is to arrive (`RolloutEngine.layout`).
        """
        self._published: Final = published
        self._tensors: Final = ShardMap.of_layout(layout).tensors
        self._boxes: Final[dict[str, dict[int, _Boxes]]] = {name: {} for name in self._tensors}
        for rank, held in layout.items():
            # As the sources send: what a rank names twice comes once.
            for piece in disjoint([piece for piece, _ in held]):
                boxes = self._boxes[piece.name]
                boxes[rank] = (*boxes.get(rank, ()), piece)
        self._parts: Final = {(rank, name): _Part() for name, ranks in self._boxes.items() for rank in ranks}

    def add(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice that came for a rank."""
        part = self._parts[rank, piece.name]
        shape = self._tensors[piece.name].shape
        part.digest = (part.digest + tensor_digest(piece.name, data, start=piece.start, shape=shape)) % MODULUS
        part.count += slices.size(piece)

    def first_wrong(self) -> str | None:
        """The first tensor, by name, that did not arrive as it was published; None if none is known to be wrong."""
        return next((name for name in sorted(self._tensors) if self._is_right(name) is False), None)

    def unchecked(self) -> list[str]:
        """Tensors, by name, of which something could not be compared with what was published.

        It did not arrive whole, or no other ranks hold just the rest of what a rank holds.
        """
        return [name for name in sorted(self._tensors) if self._is_right(name) is None]

    def _is_right(self, name: str) -> bool | None:
        """Whether a tensor arrived as it was published at every rank; None if that is not known of all of it."""
        digests: dict[_Boxes, set[int]] = {}
        is_known = True
        for rank, boxes in self._boxes[name].items():
            part = self._parts[rank, name]
            if part.count == _size(boxes):
                digests.setdefault(tuple(sorted(boxes, key=_place)), set()).add(part.digest)
            else:
                is_known = False
        if any(len(copies) > 1 for copies in digests.values()):
            return False
        for boxes in digests:
            family = _completed(boxes, digests, math.prod(self._tensors[name].shape))
            if family is None:
                is_known = False
            elif sum(digest for each in family for digest in digests[each]) % MODULUS != self._published.get(name):
                return False
        return True if is_known else None


def _completed(boxes: _Boxes, others: Iterable[_Boxes], size: int) -> list[_Boxes] | None:
    """These boxes and those of other ranks that make up a tensor of `size` elements; None if none are found."""
    family = [boxes]
    for other in others:
        if not any(slices.overlap(a, b) for each in family for a, b in itertools.product(each, other)):
            family.append(other)
    return family if sum(map(_size, family)) == size else None


def _size(boxes: _Boxes) -> int:
    return sum(map(slices.size, boxes))


def _place(piece: TensorSlice) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return piece.start, piece.shape
