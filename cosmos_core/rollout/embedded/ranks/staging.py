"""Weights on their way to ranks: the first one's are kept as they come, the others' in memory that two processes map.

What is for another rank is copied there as it comes, so that only the rank's own copy stops generation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.embedded.ranks.messages import Share
from cosmos_core.rollout.embedded.ranks.shares import local
from cosmos_core.rollout.serving.comparing import same_bits
from cosmos_core.rollout.serving.staging import StagedMemory, aligned, region
from cosmos_core.rollout.serving.updates import Update
from cosmos_core.weights import slices
from cosmos_core.weights.quantization import copy_exactly
from cosmos_core.weights.shards import torch_dtype


class Staging:
    """What is written for one rank after the first.

    Args:
        version: Of the weights.
        rank: Whose they are.
        places: Where its parts lie.

    Attributes:
        memory: Where they are, for the rank to map.
        tensors: The parts in it, by name.

    Raises:
        WeightSyncError: There is no memory for it.
    """

    def __init__(self, version: int, rank: int, places: Mapping[str, Share]) -> None:
        self._rank: Final = rank
        self._places: Final = places
        size = sum(aligned(_nbytes(place)) for place in places.values())
        self.memory: Final = StagedMemory(size, f"rank {rank} (update to version {version})")
        self.tensors: Final = parts_in(self.memory.bytes, places)
        self._update: Final = Update(version, self.tensors)

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Copy a slice in.

        Raises:
            WeightSyncError: It is not a slice of what the rank holds, or `data` has another shape.
        """
        inside = local(piece, self._places, self._rank)
        if tuple(data.shape) != piece.shape:
            raise WeightSyncError(f"{piece.name}: data of shape {tuple(data.shape)} for a slice of {piece.shape}")
        box = tuple(slice(first, first + count) for first, count in zip(inside.start, inside.shape, strict=True))
        target = self.tensors[piece.name][box]
        copy_exactly(target, data)
        # It keeps account of what was written; the data itself may go.
        self._update.write(inside, target)

    def check(self) -> None:
        """Raise WeightSyncError unless every element was written."""
        try:
            self._update.check()
        except WeightSyncError as error:
            raise WeightSyncError(f"rank {self._rank}: {error}") from None


class RanksUpdate(Update):
    """What is written between `begin_update` and `commit_update`, for every rank.

    Args:
        version: Of the weights.
        tensors: What the first rank holds of each.
        places: Where the parts of each rank lie.
    """

    def __init__(
        self, version: int, tensors: Mapping[str, torch.Tensor], places: Mapping[int, Mapping[str, Share]]
    ) -> None:
        super().__init__(version, tensors)
        self._places: Final = places
        self.stagings: Final[dict[int, Staging]] = {}

    def write_to(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice for a rank.

        Raises:
            WeightSyncError: There is no such rank, it holds no such slice, or `data` has another shape.
        """
        if rank not in self._places:
            raise WeightSyncError(f"rank {rank} does not exist: this engine has ranks 0 to {max(self._places)}")
        if rank == 0:
            self.write(local(piece, self._places[0], 0), data)
            return
        if rank not in self.stagings:
            self.stagings[rank] = Staging(self.version, rank, self._places[rank])
        self.stagings[rank].write(piece, data)

    def check(self) -> None:
        """Raise WeightSyncError unless every element of every rank's parts was written."""
        super().check()
        for rank in sorted(self._places.keys() - {0}):
            if rank not in self.stagings:
                raise WeightSyncError(f"update to version {self.version}: nothing was written for rank {rank}")
            self.stagings[rank].check()

    def first_wrong(self) -> str:
        """A tensor of which the first rank does not hold, bit by bit, what was written for it; empty if there is none.

        Where a place was written twice, what was written last counts.
        """
        for name, pieces in self._pieces.items():
            for index, (piece, data) in enumerate(pieces):
                later = [each for each, _ in pieces[index + 1 :]]
                if not self._holds(piece, data) and any(
                    not self._holds(part, data[slices.within(part, piece)]) for part in _left(piece, later)
                ):
                    return name
        return ""

    def _holds(self, piece: TensorSlice, data: torch.Tensor) -> bool:
        held = self._tensors[piece.name]
        found = held[slices.within(piece, slices.whole(piece.name, tuple(held.shape)))]
        return same_bits(found, data.to(held.dtype))

    def close(self) -> None:
        """Let go of what was written. Idempotent."""
        super().close()
        for staging in self.stagings.values():
            staging.memory.close()
        self.stagings.clear()


def _left(piece: TensorSlice, others: Sequence[TensorSlice]) -> list[TensorSlice]:
    """What a slice has, and none of the others."""
    left = [piece]
    for other in others:
        left = [part for each in left for part in slices.without(each, other)]
    return left


def parts_in(memory: torch.Tensor, places: Mapping[str, Share]) -> dict[str, torch.Tensor]:
    """A rank's parts, by name, one after another in memory, uint8 [size]."""
    found: dict[str, torch.Tensor] = {}
    offset = 0
    for name in sorted(places):
        found[name] = region(memory, offset, torch_dtype(places[name].dtype), places[name].size)
        offset += aligned(_nbytes(places[name]))
    return found


def _nbytes(place: Share) -> int:
    return math.prod(place.size) * torch_dtype(place.dtype).itemsize
