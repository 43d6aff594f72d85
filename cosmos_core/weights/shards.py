"""Shards of canonical tensors: those that each rank of a pool holds or wants, and those of this process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import attrs
import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (  # the ones that know every placement
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice

Exchange: TypeAlias = Callable[[bytes], Sequence[bytes]]
"""Gives every process what each of them said, in the order of ranks; all of them call it."""

EngineLayout: TypeAlias = Mapping[int, Sequence[tuple[TensorSlice, str]]]
"""What each rank of an engine holds, with its dtype (`RolloutEngine.layout`)."""

Merge: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Makes of a process's share of a tensor, which it leaves alone, what is sent of it, of the same shape and dtype."""


@attrs.frozen(kw_only=True)
class TensorFacts:
    """A canonical tensor.

    Attributes:
        dtype: torch dtype name without `torch.`, such as `bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return torch_dtype(self.dtype).itemsize


@attrs.frozen(kw_only=True)
class TensorShard:
    """A shard of a canonical tensor: what a process holds of it, publishes, or keeps in a file.

    Attributes:
        start: Where the shard begins in the tensor.
        size: Shape of the shard.
        offset: First byte in the file of a snapshot, where it lies in one; elements lie C-contiguous from there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int = 0

    @property
    def piece(self) -> TensorSlice:
        """The slice of the tensor that the shard holds."""
        return TensorSlice(name=self.name, start=self.start, shape=self.size)

    @property
    def facts(self) -> TensorFacts:
        """The dtype and shape of the whole tensor."""
        return TensorFacts(shape=self.shape, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the shard in bytes."""
        return math.prod(self.size) * self.facts.itemsize


@attrs.frozen(kw_only=True)
class ShardMap:
    """The slices of each rank."""

    tensors: Mapping[str, TensorFacts]
    ranks: Mapping[int, tuple[TensorSlice, ...]]

    @classmethod
    def of_layout(cls, layout: EngineLayout) -> ShardMap:
        """The slices that an engine's ranks hold (`RolloutEngine.layout`); together they reach each tensor's end."""
        tensors: dict[str, TensorFacts] = {}
        for held in layout.values():
            for piece, dtype in held:
                end = tuple(first + count for first, count in zip(piece.start, piece.shape, strict=True))
                facts = TensorFacts(shape=end, dtype=dtype.removeprefix("torch."))
                tensors[piece.name] = _joined(piece.name, tensors.get(piece.name), facts)
        return cls(tensors=tensors, ranks={rank: tuple(piece for piece, _ in held) for rank, held in layout.items()})


@attrs.frozen(kw_only=True, eq=False)
class LocalShard:
    """A process's shard of a tensor, with its content; it may be empty.

    Attributes:
        tensor: The content; writing into it changes what the process holds.
        shape: Shape of the whole tensor.
        merge: Adds what lies beside the tensor, if anything does.
    """

    tensor: torch.Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    merge: Merge | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the shard in the whole tensor."""
        return tuple(slice(first, first + count) for first, count in zip(self.start, self.tensor.shape, strict=True))

    def sent(self) -> torch.Tensor:
        """The content as it is published and exported, made at each call if something is merged."""
        return self.tensor if self.merge is None else self.merge(self.tensor)


def local_shard(tensor: torch.Tensor, merge: Merge | None = None) -> LocalShard:
    """The part of a tensor that this process holds: its shard of a `DTensor`, all of any other."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor=tensor.detach(), start=(0,) * len(shape), shape=shape, merge=merge)
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: torch.Tensor = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(size), f"a shard of {tuple(local.shape)} in a place of {tuple(size)}"
    return LocalShard(tensor=local, start=tuple(start), shape=shape, merge=merge)


def shard_of(name: str, share: LocalShard, dtype: torch.dtype | None = None) -> TensorShard:
    """Describe a process's shard, in another dtype if that is given."""
    return TensorShard(
        name=name,
        shape=share.shape,
        dtype=dtype_name(share.tensor.dtype if dtype is None else dtype),
        start=share.start,
        size=tuple(share.tensor.shape),
    )


def is_placeable(rows: int, tp: int, shards: int) -> bool:
    """Tell whether `DTensor` knows where each process's rows of a tensor lie that `tp` splits and FSDP shards again.

    Of uneven parts it does not always: it would save and publish some rows in the place of others.
    """
    placements = [_StridedShard(0, split_factor=tp), Shard(0)]
    parts = torch.arange(rows).tensor_split([min(part * math.ceil(rows / tp), rows) for part in range(1, tp)])
    for place, part in enumerate(parts):
        held = [*part.chunk(shards), *[part[:0]] * shards]
        for shard in range(shards):
            size, start = _compute_local_shape_and_global_offset((rows,), (shards, tp), [shard, place], placements)
            if held[shard].tolist() != list(range(start[0], start[0] + size[0])):
                return False
    return True


def local_shards(
    tensors: Mapping[str, torch.Tensor], merges: Mapping[str, Merge] = MappingProxyType({})
) -> dict[str, LocalShard]:
    """The parts of some tensors that this process holds, by name."""
    return {name: local_shard(tensor, merges.get(name)) for name, tensor in tensors.items()}


def shard_owners(
    shares: Mapping[str, LocalShard], exchange: Exchange, *, divide: bool = False
) -> dict[str, dict[TensorShard, int]]:
    """The disjoint shards that make up each tensor of the replica, with the process that speaks for each.

    All processes of the replica call this. With `divide`, those that hold equal shards divide them evenly, by bytes;
    else the one of the lowest rank speaks for each. A WeightSyncError names a tensor that is not made up exactly.
    """
    mine = [shard_of(name, share) for name, share in shares.items()]
    found: dict[str, dict[TensorShard, list[int]]] = {}
    for rank, said in enumerate(exchange(msgspec.json.encode(mine))):
        for shard in msgspec.json.decode(said, type=list[TensorShard]):
            holders = found.setdefault(shard.name, {})
            # An empty shard says nothing, except of an empty tensor.
            if all(shard.size) or not all(shard.shape):
                holders.setdefault(shard, []).append(rank)
    for name, holders in sorted(found.items()):
        _check_complete(name, holders)
    loads: Counter[int] = Counter()
    owners: dict[str, dict[TensorShard, int]] = {name: {} for name in sorted(found)}
    # The largest first, each to whoever holds it and has the fewest bytes so far.
    shards = [(shard.nbytes, shard) for holders in found.values() for shard in holders]
    for nbytes, shard in sorted(shards, key=lambda each: (-each[0], each[1].name, each[1].start)):
        ranks = found[shard.name][shard]
        owner = min(ranks, key=lambda rank: (loads[rank], rank)) if divide else ranks[0]
        loads[owner] += nbytes
        owners[shard.name][shard] = owner
    return owners


def owned(shares: Mapping[str, LocalShard], rank: int, exchange: Exchange) -> frozenset[str]:
    """Names of the shards that this process speaks for; those that hold equal ones divide them evenly."""
    owners = shard_owners(shares, exchange, divide=True)
    return frozenset(name for name, ranks in owners.items() if rank in ranks.values())


def canonical_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that are sent: parameters (tied ones once), then persistent float buffers.

    Parameters of a module that is spread over processes are `DTensor`s; see `local_shards`.
    """
    # First, as FSDP puts its shards back in place of gathered parameters when it is asked for the state.
    saved = module.state_dict().keys()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved and buffer.is_floating_point()}
    return {**parameters, **buffers}


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: `dtype` for floating-point ones, else its own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name that `dtype_name` made."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{name!r} is not a torch dtype; both sides must run compatible releases of torch")
    return dtype


def _joined(name: str, one: TensorFacts | None, other: TensorFacts) -> TensorFacts:
    if one is None:
        return other
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        raise WeightSyncError(
            f"{name}: the engine's ranks disagree: {one.dtype} with {len(one.shape)} dims and "
            f"{other.dtype} with {len(other.shape)} dims"
        )
    return attrs.evolve(one, shape=tuple(map(max, one.shape, other.shape)))


def _check_complete(name: str, shards: Collection[TensorShard]) -> None:
    facts = {shard.facts for shard in shards}
    shape = next((fact.shape for fact in facts), ())
    count, full = sum(math.prod(shard.size) for shard in shards), math.prod(shape)
    if len(facts) != 1 or count != full:
        raise WeightSyncError(
            f"{name}: the processes of the replica hold {count:,} of its {full:,} elements, each counted once; "
            "the layout splits it in a way that cannot be put together"
        )
