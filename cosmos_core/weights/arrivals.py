"""What arrived of a version, checked tensor by tensor before any of it is loaded: which one is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.digest import MODULUS, tensor_digest
from cosmos_core.weights.shards import ShardMap


class Arrivals:
    """Adds up the digests of slices as they come. A slice that several ranks get is counted once."""

    def __init__(self, published: Mapping[str, int], layout: Mapping[int, Sequence[tuple[TensorSlice, str]]]) -> None:
        """Begin with nothing.

        Args:
            published: Digest of each tensor.
            layout: What is to arrive (`RolloutEngine.layout`).
        """
        self._published: Final = published
        self._tensors: Final = ShardMap.of_layout(layout).tensors
        self._seen: Final[set[TensorSlice]] = set()
        self._digests: Final[dict[str, int]] = dict.fromkeys(self._tensors, 0)
        self._counts: Final[dict[str, int]] = dict.fromkeys(self._tensors, 0)

    def add(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice."""
        if piece in self._seen:
            return
        self._seen.add(piece)
        shape = self._tensors[piece.name].shape
        digest = tensor_digest(piece.name, data, start=piece.start, shape=shape)
        self._digests[piece.name] = (self._digests[piece.name] + digest) % MODULUS
        self._counts[piece.name] += slices.size(piece)

    def first_wrong(self) -> str | None:
        """The first tensor, by name, that did not arrive as it was published; None if there is none.

        Of tensors whose slices overlap without being the same, nothing can be said.
        """
        return next(
            (
                name
                for name in sorted(self._tensors)
                if self._counts[name] == math.prod(self._tensors[name].shape)
                and self._digests[name] != self._published.get(name)
            ),
            None,
        )
