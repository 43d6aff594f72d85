"""Weights on their way to ranks: the first one's are kept as they come, the others' in memory that two processes map.

What is for another rank is copied there as it comes, so that only the rank's own copy stops generation.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Final

import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.embedded.ranks.messages import Share
from cosmos_core.rollout.embedded.ranks.shares import local
from cosmos_core.rollout.serving.updates import Update
from cosmos_core.weights.quantisation import copy_exactly
from cosmos_core.weights.shards import torch_dtype

_ALIGNMENT: Final = 64


class Staging:
    """What is written for one rank after the first. The memory has no name anywhere, and goes with this.

    Args:
        version: Of the weights.
        rank: Whose they are.
        places: Where its parts lie.

    Raises:
        WeightSyncError: There is no memory for it.
    """

    def __init__(self, version: int, rank: int, places: Mapping[str, Share]) -> None:
        self._rank: Final = rank
        self._places: Final = places
        self.size: Final = size_of(places)
        self.descriptor: Final = os.memfd_create(f"cosmos-rank-{rank}")
        self.close: Final = weakref.finalize(self, os.close, self.descriptor)
        try:
            os.posix_fallocate(self.descriptor, 0, self.size)
            self.tensors: Final = mapped(self.descriptor, self.size, places)
        except OSError as error:
            raise WeightSyncError(
                f"update to version {version}: no memory for the {self.size:,} bytes of rank {rank}: {error}"
            ) from error
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

    def close(self) -> None:
        """Let go of what was written. Idempotent."""
        super().close()
        for staging in self.stagings.values():
            staging.close()
        self.stagings.clear()


def size_of(places: Mapping[str, Share]) -> int:
    """Bytes of a rank's parts, one after another."""
    return max(1, sum(_padded(place) for place in places.values()))


def mapped(descriptor: int, size: int, places: Mapping[str, Share]) -> dict[str, torch.Tensor]:
    """The parts that lie in a memory file, by name; mapped as long as one of them is referenced."""
    memory = mmap.mmap(descriptor, size)
    found: dict[str, torch.Tensor] = {}
    offset = 0
    for name in sorted(places):
        place, dtype = places[name], torch_dtype(places[name].dtype)
        count = math.prod(place.size)
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        found[name] = flat.view(place.size)
        offset += _padded(place)
    return found


def _padded(place: Share) -> int:
    nbytes = math.prod(place.size) * torch_dtype(place.dtype).itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
