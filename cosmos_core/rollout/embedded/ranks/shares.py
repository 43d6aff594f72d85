"""What a rank holds of a model: its part of each canonical tensor, where it lies, and its digest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import Layout, Mesh, Model, TensorSlice
from cosmos_core.rollout.embedded.ranks.messages import Share
from cosmos_core.rollout.serving.ranks import RankCells
from cosmos_core.weights import slices
from cosmos_core.weights.digest import tensor_digest
from cosmos_core.weights.held import all_held
from cosmos_core.weights.shards import canonical_tensors, dtype_name


class Shares:
    """This rank's part of each canonical tensor.

    Attributes:
        tensors: The parts themselves; writing into one changes what the module computes.
        places: Where each lies.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the parameters of a module out of their `DTensor`s: forwards only need what this rank holds."""
        held = all_held(canonical_tensors(module))
        self.tensors: Final = {name: each.tensor for name, each in held.items()}
        self.places: Final = {
            name: Share(
                start=each.placement.start,
                size=tuple(each.tensor.shape),
                shape=each.placement.shape,
                dtype=dtype_name(each.tensor.dtype),
            )
            for name, each in held.items()
        }
        _localize(module)

    def digests(self) -> dict[str, int]:
        """Digest of each part, read back."""
        return {
            name: tensor_digest(name, self.tensors[name], start=place.start, shape=place.shape)
            for name, place in self.places.items()
        }


def build(model: Model, *, seed: int, dtype: torch.dtype, device: torch.device, mesh: Mesh) -> tuple[nn.Module, Shares]:
    """This rank's part of a model, by the plan with which the policy splits it; every rank calls it.

    Raises:
        CosmosError: It cannot be built, or not be split.
    """
    layout = Layout(mesh=mesh, micro_batch_precision=dtype_name(dtype), sequence_parallel=False, is_frozen=True)
    module = model.build(seed=seed, dtype=dtype, device=device, layout=layout)
    module.eval().requires_grad_(requires_grad=False)
    return module, Shares(module)


def layout_of(places: Mapping[str, Share]) -> list[tuple[TensorSlice, str]]:
    """A rank's slices and their dtype names; nothing of a tensor of which it has no element."""
    return [
        (_box(name, place), place.dtype)
        for name, place in places.items()
        if math.prod(place.size) or not math.prod(place.shape)
    ]


def local(piece: TensorSlice, places: Mapping[str, Share], rank: int) -> TensorSlice:
    """Where a slice of a canonical tensor lies in a rank's part of it.

    Raises:
        WeightSyncError: The rank does not hold it.
    """
    place = places.get(piece.name)
    if place is None:
        raise WeightSyncError(f"rank {rank}: {piece.name!r} is not a tensor of this model")
    if not slices.contains(_box(piece.name, place), piece):
        raise WeightSyncError(
            f"{piece.name}: a slice of {piece.shape} at {piece.start} is not in the part of rank {rank}, of "
            f"{place.size} at {place.start}"
        )
    start = tuple(first - base for first, base in zip(piece.start, place.start, strict=True))
    return TensorSlice(name=piece.name, start=start, shape=piece.shape)


def joined(ranks: Mapping[int, Mapping[str, Share]]) -> RankCells:
    """What the ranks hold together: each tensor, in parts that one or several hold whole.

    Raises:
        EngineError: Their parts do not make it up; names the tensor.
    """
    shapes = {name: (part.shape, part.dtype) for places in ranks.values() for name, part in places.items()}
    cells = RankCells(
        shapes, {rank: {name: [_box(name, part)] for name, part in places.items()} for rank, places in ranks.items()}
    )
    for name, whole in shapes.items():
        parts = {places[name] for places in ranks.values() if name in places}
        count, size = cells.num_held(name), math.prod(whole[0])
        boxes = {_box(name, part) for part in parts if math.prod(part.size)}
        is_split_up = any(box not in boxes for rank in ranks for box in cells.of(rank)[name])
        if count != size or is_split_up or any((part.shape, part.dtype) != whole for part in parts):
            found = ", ".join(
                f"{part.size} at {part.start} of {part.shape} {part.dtype}" for part in sorted(parts, key=str)
            )
            raise EngineError(
                f"{name}: the {len(ranks)} ranks of the engine hold {count:,} of its {size:,} elements, each counted "
                f"once, in the parts {found}; the model is split over tp in a way that cannot be put together"
            )
    return cells


def _box(name: str, part: Share) -> TensorSlice:
    return TensorSlice(name=name, start=part.start, shape=part.size)


def _localize(module: nn.Module) -> None:
    """Parameters that are `DTensor`s become what this rank has of them; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for key, parameter in list(each.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                setattr(each, key, made[id(parameter)])
