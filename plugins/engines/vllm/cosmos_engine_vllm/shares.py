"""The slices that each rank of vLLM holds, and an update that is written to each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.serving.updates import Update, covers
from cosmos_core.weights import slices
from cosmos_core.weights.shards import dtype_name
from cosmos_engine_vllm.ranks import RankShards, RankSlices
from cosmos_engine_vllm.staging import Place, Staging

Sent: TypeAlias = list[tuple[TensorSlice, torch.Tensor | Place]]


class Shares:
    """The slices that each rank holds of the tensors that are sent.

    Attributes:
        tensors: Each of them, on the meta device.
        shards: The slices of each rank, disjoint, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], found: Sequence[RankSlices], owner: str) -> None:
        """Join what the ranks found.

        Args:
            tensors: Each tensor that is sent, on the meta device.
            found: The slices of each rank.
            owner: The class of vLLM's model, for errors.

        Raises:
            EngineError: Part of a tensor is held by no rank.
        """
        self.tensors: Final = tensors
        self.shards: Final = {
            rank: {name: _joined(held, tuple(tensors[name].shape)) for name, held in each.items() if held}
            for rank, each in enumerate(found)
        }
        self._rank_shards: Final = RankShards(tensors, self.shards)
        for name, tensor in tensors.items():
            size = self._rank_shards.num_held(name)
            if size != tensor.numel():
                raise EngineError(
                    f"vLLM's {owner} copies {size} of the {tensor.numel()} values of {name!r} into its parameters: it "
                    "holds that tensor in a form of its own, which cannot be written or attested; use the engine "
                    "'embedded'"
                )

    def layout(self) -> dict[int, list[tuple[TensorSlice, str]]]:
        """The slices of each rank, with the names of their dtypes."""
        return {
            rank: [(shard, dtype_name(self.tensors[name].dtype)) for name, shards in held.items() for shard in shards]
            for rank, held in self.shards.items()
        }

    def rank_shards(self) -> dict[int, dict[str, list[TensorSlice]]]:
        """The slices whose digests each rank is asked for."""
        return {rank: self._rank_shards.of(rank) for rank in self.shards}

    def combine(self, found: Sequence[Mapping[str, Sequence[int]]]) -> str:
        """The digest of all tensors, from those of each rank's `rank_shards`.

        Raises:
            AttestationError: Ranks that hold the same slice hold other values.
        """
        return self._rank_shards.combine(dict(enumerate(found)), "vLLM")


class SharedUpdate(Update):
    """An update as it is written to each rank between `begin_update` and `commit_update`."""

    def __init__(self, version: int, shares: Shares, *, is_staged: bool, size_bytes: int | None = None) -> None:
        """Open it.

        Args:
            version: Of the weights.
            shares: What each rank holds.
            is_staged: Whether the ranks are other processes: slices are copied to where these can read them.
            size_bytes: What will be written, if it is not all.
        """
        super().__init__(version, shares.tensors)
        self._shards: Final = shares.shards
        self._sent: Final[dict[int, Sent]] = {rank: [] for rank in shares.shards}
        size = sum(
            slices.size(shard) * shares.tensors[name].element_size()
            for held in shares.shards.values()
            for name, shards in held.items()
            for shard in shards
        )
        self._staging: Final = Staging(size if size_bytes is None else size_bytes) if is_staged else None

    def write_to(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice for a rank.

        Raises:
            WeightSyncError: There is no such rank, or no memory for it; it is not a slice of a tensor held here, or
                `data` has another shape.
        """
        if rank not in self._sent:
            raise WeightSyncError(f"rank {rank} does not exist: this vLLM has the ranks 0 to {len(self._sent) - 1}")
        self._check_slice(piece, data)
        self._sent[rank].append((piece, data if self._staging is None else self._staging.put(data)))

    def check(self) -> None:
        """Raise WeightSyncError unless every slice of every rank was written."""
        lacking = [
            (rank, shard)
            for rank, held in self._shards.items()
            for shard in _unwritten(held, [piece for piece, _ in self._sent[rank]])
        ]
        if lacking:
            rank, shard = lacking[0]
            raise WeightSyncError(
                f"update to version {self.version}: {len(lacking)} slices are not wholly written, the first is that of "
                f"{shard.name!r}, of {shard.shape} at {shard.start}, for rank {rank}"
            )

    def sent(self) -> Mapping[int, Sent]:
        """The slices that each rank is to load."""
        return self._sent

    def close(self) -> None:
        """Let go of what was written. Idempotent."""
        self._sent.clear()
        if self._staging is not None:
            self._staging.close()


def _joined(held: Sequence[TensorSlice], shape: tuple[int, ...]) -> list[TensorSlice]:
    """Disjoint slices of a tensor; all of it in one, if they are all of it."""
    name = held[0].name
    return [slices.whole(name, shape)] if sum(map(slices.size, held)) == math.prod(shape) else list(held)


def _unwritten(held: RankSlices, pieces: Sequence[TensorSlice]) -> Iterator[TensorSlice]:
    """Slices that some pieces do not cover."""
    by_name: dict[str, list[TensorSlice]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, shards in held.items():
        for shard in shards:
            parts = [part for piece in by_name.get(name, ()) if (part := slices.overlap(piece, shard)) is not None]
            if not covers([_moved(part, shard) for part in parts], shard.shape):
                yield shard


def _moved(part: TensorSlice, shard: TensorSlice) -> TensorSlice:
    start = tuple(first - base for first, base in zip(part.start, shard.start, strict=True))
    return TensorSlice(name=part.name, start=start, shape=part.shape)
