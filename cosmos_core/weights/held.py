"""What one process holds of tensors that are spread over processes, and who speaks for what several hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # the one that knows every placement

from cosmos_core.errors import WeightSyncError
from cosmos_core.weights.shards import dtype_name, torch_dtype

Exchange: TypeAlias = Callable[[bytes], Sequence[bytes]]
"""Gives every process what each of them said, in the order of ranks; all of them call it."""


@attrs.frozen(kw_only=True)
class Placement:
    """Where a rank's tensor lies in the whole one: its first index and the whole's shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class Held:
    """A process's share of a tensor: one box of it, which may be empty.

    Attributes:
        tensor: The share; writing into it changes what the process holds.
        placement: Where it lies in the whole tensor.
    """

    tensor: torch.Tensor
    placement: Placement

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the share in the whole tensor."""
        pairs = zip(self.placement.start, self.tensor.shape, strict=True)
        return tuple(slice(first, first + count) for first, count in pairs)


def held(tensor: torch.Tensor) -> Held:
    """What this process holds of a tensor: its shard of a `DTensor`, all of any other."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Held(tensor=tensor.detach(), placement=Placement(start=(0,) * len(shape), shape=shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: torch.Tensor = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(size), f"a shard of {tuple(local.shape)} in a place of {tuple(size)}"
    return Held(tensor=local, placement=Placement(start=tuple(start), shape=tuple(tensor.shape)))


def all_held(tensors: Mapping[str, torch.Tensor]) -> dict[str, Held]:
    """What this process holds of each of some tensors."""
    return {name: held(tensor) for name, tensor in tensors.items()}


@attrs.frozen(kw_only=True)
class Box:
    """A part of a tensor, and the process that speaks for it."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    rank: int


@attrs.frozen(kw_only=True)
class Spread:
    """Where a tensor is.

    Attributes:
        shape: Of the whole.
        dtype: torch dtype name.
        boxes: Disjoint; together they are the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]


@attrs.frozen(kw_only=True)
class _Said:
    start: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


def spreads(shares: Mapping[str, Held], exchange: Exchange, *, divide: bool = False) -> dict[str, Spread]:
    """Where every tensor of the replica is, by name.

    Args:
        shares: What this process holds.
        exchange: Between the processes of the replica; all of them call this.
        divide: Whether the processes that hold equal shares divide them evenly, by bytes; else the one of the lowest
            rank speaks for each.

    Raises:
        WeightSyncError: The shares of all processes do not make up a tensor exactly; it is named.
    """
    mine = {
        name: _Said(
            start=share.placement.start,
            size=tuple(share.tensor.shape),
            shape=share.placement.shape,
            dtype=dtype_name(share.tensor.dtype),
        )
        for name, share in shares.items()
    }
    found: dict[str, dict[_Said, list[int]]] = {}
    for rank, said in enumerate(exchange(msgspec.json.encode(mine))):
        for name, share in msgspec.json.decode(said, type=dict[str, _Said]).items():
            boxes = found.setdefault(name, {})
            # An empty share says nothing, except of an empty tensor.
            if all(share.size) or not all(share.shape):
                boxes.setdefault(share, []).append(rank)
    speakers = _divided(found) if divide else {name: _first(boxes) for name, boxes in found.items()}
    return {name: _spread(name, speakers[name]) for name in sorted(found)}


def owned(shares: Mapping[str, Held], rank: int, exchange: Exchange) -> frozenset[str]:
    """Names of the shares that this process speaks for; those that hold equal ones divide them evenly.

    Raises:
        WeightSyncError: The shares of all processes do not make up a tensor exactly; it is named.
    """
    return frozenset(
        name
        for name, spread in spreads(shares, exchange, divide=True).items()
        if any(box.rank == rank for box in spread.boxes)
    )


def _first(boxes: Mapping[_Said, Sequence[int]]) -> dict[_Said, int]:
    return {said: ranks[0] for said, ranks in boxes.items()}


def _divided(found: Mapping[str, Mapping[_Said, Sequence[int]]]) -> dict[str, dict[_Said, int]]:
    """Who speaks for each share: the largest first, each to whoever holds it and has the fewest bytes so far."""
    speakers: dict[str, dict[_Said, int]] = {name: {} for name in found}
    loads: Counter[int] = Counter()
    listed = [(_nbytes(said), name, said) for name, boxes in found.items() for said in boxes]
    for nbytes, name, said in sorted(listed, key=lambda each: (-each[0], each[1], each[2].start)):
        speaker = min(found[name][said], key=lambda rank: (loads[rank], rank))
        loads[speaker] += nbytes
        speakers[name][said] = speaker
    return speakers


def _nbytes(said: _Said) -> int:
    return math.prod(said.size) * torch_dtype(said.dtype).itemsize


def _spread(name: str, boxes: Mapping[_Said, int]) -> Spread:
    shapes = {(said.shape, said.dtype) for said in boxes}
    shape, dtype = next(iter(shapes), ((), ""))
    count, full = sum(math.prod(said.size) for said in boxes), math.prod(shape)
    if len(shapes) != 1 or count != full:
        raise WeightSyncError(
            f"{name}: the processes of the replica hold {count:,} of its {full:,} elements, each counted once; "
            "the layout splits it in a way that cannot be put together"
        )
    return Spread(
        shape=shape,
        dtype=dtype,
        boxes=tuple(Box(start=said.start, size=said.size, rank=rank) for said, rank in boxes.items()),
    )
