"""The processes of vLLM: the shards that ranks hold, their digest, and memory for weights on their way to them."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from cosmos_core.errors import AttestationError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.digest import add_digests, combine

RankSlices: TypeAlias = Mapping[str, Sequence[TensorSlice]]
"""The slices of one rank, disjoint, by name."""
HeldShard: TypeAlias = tuple[TensorSlice, frozenset[int]]
"""A slice, and the ranks that hold all of it; no other holds any of it."""


class RankShards:
    """The shards of each tensor: disjoint, and all that any rank holds."""

    def __init__(self, names: Iterable[str], held: Mapping[int, RankSlices]) -> None:
        """Divide what ranks hold.

        Args:
            names: Every tensor, those that no rank holds included.
            held: The slices of each rank.
        """
        self._ranks: Final = tuple(held)
        self._shards: Final[dict[str, list[HeldShard]]] = {
            name: divide({rank: held_slices.get(name, ()) for rank, held_slices in held.items()}) for name in names
        }

    def num_held(self, name: str) -> int:
        """Elements of a tensor that ranks hold, each counted once."""
        return sum(slices.size(part) for part, _ in self._shards[name])

    def of(self, rank: int) -> dict[str, list[TensorSlice]]:
        """The shards that a rank holds, whose digests it is asked for."""
        return {name: [part for part, ranks in held if rank in ranks] for name, held in self._shards.items()}

    def combine(self, digests: Mapping[int, Mapping[str, Sequence[int]]], owner: str) -> str:
        """The digest of all tensors.

        Args:
            digests: Of each rank, those of its shards, as `of` has them.
            owner: Whose ranks these are, for errors: "the engine", "vLLM".

        Raises:
            AttestationError: Ranks that hold the same shard hold other values; names both, and the shard.
        """
        return combine(add_digests({name: digest} for name, digest in self._agreed(digests, owner)))

    def _agreed(self, digests: Mapping[int, Mapping[str, Sequence[int]]], owner: str) -> Iterator[tuple[str, int]]:
        for name, held in self._shards.items():
            given = {rank: iter(digests[rank][name]) for rank in self._ranks}
            if not held:
                yield name, 0
            for part, ranks in held:
                found = {rank: next(given[rank]) for rank in sorted(ranks)}
                first, *others = found
                for rank in others:
                    if found[rank] != found[first]:
                        raise AttestationError(
                            f"{name}: ranks {first} and {rank} of {owner} hold other values in the slice of "
                            f"{part.shape} at {part.start}, which both were given"
                        )
                yield name, found[first]


def divide(held: Mapping[int, Sequence[TensorSlice]]) -> list[HeldShard]:
    """Disjoint slices of a tensor, each with those that hold all of it.

    Args:
        held: The slices of each rank of one tensor, disjoint within a rank.
    """
    common_parts: list[HeldShard] = []
    for rank, shards in held.items():
        for shard in filter(slices.size, shards):
            rest, divided = [shard], []
            for part, ranks in common_parts:
                common = slices.overlap(part, shard)
                if common is None:
                    divided.append((part, ranks))
                    continue
                divided += [(part, ranks) for part in slices.subtract(part, common)]
                divided.append((common, ranks | {rank}))
                rest = [part for each in rest for part in slices.without(each, common)]
            common_parts = divided + [(part, frozenset({rank})) for part in rest]
    return common_parts


_ALIGNMENT: Final = 64


class StagedMemory:
    """Memory of this process that others may map until it is closed; what they have mapped stays theirs.

    It has no name in a file system (`memfd_create`), so that nothing is left of it whatever ends the processes. Others
    get its descriptor, or find it by that of the process that made it.

    Attributes:
        descriptor: Of the memory, while it is not closed.
        size: Bytes, one at least.
        bytes: All of it, uint8 [size]; to be used until it is closed, and longer where it is referenced.
    """

    def __init__(self, size_bytes: int, receiver: str) -> None:
        """Take the memory.

        Args:
            size_bytes: How much.
            receiver: Who is to read it, for errors.

        Raises:
            WeightSyncError: There is none, or no descriptor for it.
        """
        self.size: Final = max(1, size_bytes)
        descriptor = -1
        try:
            descriptor = os.memfd_create("cosmos-weights")
            # Reserves the memory: without it, a write that finds none would kill the process.
            os.posix_fallocate(descriptor, 0, self.size)
            buffer = mmap.mmap(descriptor, self.size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise WeightSyncError(
                f"cannot take {self.size:,} bytes of memory for weights on their way to {receiver} "
                f"({error.strerror}); free memory or descriptors, or split the model over more ranks"
            ) from error
        self.descriptor: Final = descriptor
        self.bytes: Final = torch.frombuffer(buffer, dtype=torch.uint8)
        self._finalizer: Final = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Let the memory go. Idempotent."""
        self._finalizer()


def map_staged(descriptor: int) -> torch.Tensor:
    """Memory of another process, uint8 [size]: private, so that a write here would change nothing there.

    Raises:
        WeightSyncError: It cannot be mapped.
    """
    try:
        buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"the memory that weights were put in cannot be mapped: {error}") from error
    return torch.frombuffer(buffer, dtype=torch.uint8)


def region(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The contiguous tensor that begins at a byte of memory; the offset is one of `aligned`."""
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


def aligned(size_bytes: int) -> int:
    """Bytes after which a tensor of any dtype may begin."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
