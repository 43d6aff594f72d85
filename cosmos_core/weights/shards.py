"""Who holds what: for each rank, the slices of canonical tensors that it has or wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices

EngineLayout: TypeAlias = Mapping[int, Sequence[tuple[TensorSlice, str]]]
"""What each rank of an engine holds, with its dtype (`RolloutEngine.layout`)."""


@attrs.frozen(kw_only=True)
class TensorFacts:
    """A canonical tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: torch dtype name without `torch.`, such as `bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return torch_dtype(self.dtype).itemsize


@attrs.frozen(kw_only=True)
class ShardMap:
    """The slices of each rank.

    Attributes:
        tensors: Every tensor of which a rank has a slice, by canonical name.
        ranks: Slices of each rank.
    """

    tensors: Mapping[str, TensorFacts]
    ranks: Mapping[int, tuple[TensorSlice, ...]]

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> ShardMap:
        """One rank that holds whole tensors; floating-point ones as `dtype` if given."""
        facts = {
            name: TensorFacts(shape=tuple(t.shape), dtype=dtype_name(cast(t, dtype))) for name, t in tensors.items()
        }
        return cls(tensors=facts, ranks={0: tuple(slices.whole(name, fact.shape) for name, fact in facts.items())})

    @classmethod
    def of_layout(cls, layout: EngineLayout) -> ShardMap:
        """The slices that an engine's ranks hold (`RolloutEngine.layout`); together they reach each tensor's end.

        Raises:
            WeightSyncError: Two ranks hold one tensor with different dtypes or numbers of dims.
        """
        tensors: dict[str, TensorFacts] = {}
        for held in layout.values():
            for piece, dtype in held:
                end = tuple(first + count for first, count in zip(piece.start, piece.shape, strict=True))
                facts = TensorFacts(shape=end, dtype=dtype.removeprefix("torch."))
                tensors[piece.name] = _joined(piece.name, tensors.get(piece.name), facts)
        return cls(tensors=tensors, ranks={rank: tuple(piece for piece, _ in held) for rank, held in layout.items()})


def canonical_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that travel: parameters (tied ones once), then persistent float buffers.

    Parameters of a module that is spread over processes are `DTensor`s; see `held`.
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
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name that `dtype_name` made.

    Raises:
        WeightSyncError: torch has no such dtype.
    """
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
