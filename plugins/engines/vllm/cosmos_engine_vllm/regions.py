"""The places where vLLM keeps each canonical tensor: fused, stacked and padded, found by watching it load.

A model's `load_weights` knows how tensors of a checkpoint go into its parameters. It is run once with tensors that hold
nothing, and every copy that it would make is noted instead of made: from which shard of the tensor, to which view of
which parameter. Nothing here knows a family of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_core.errors import EngineError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_engine_vllm import latent
from cosmos_engine_vllm.census import is_default

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_COPY: Final = torch.ops.aten.copy_.default
_PADDED: Final = "VocabParallelEmbedding"
"""vLLM's class of embeddings, and of heads of language models."""


@attrs.frozen(kw_only=True)
class Region:
    """A shard of a canonical tensor, and the view of a parameter that holds it.

    Attributes:
        piece: The shard.
        parameter: Name of the parameter in vLLM.
        offset: Of the view in its storage.
        stride: Of the view.
    """

    piece: TensorSlice
    parameter: str
    offset: int
    stride: tuple[int, ...]

    def view(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The live values."""
        return torch.as_strided(parameters[self.parameter].data, self.piece.shape, self.stride, self.offset)


def find_regions(model: torch.nn.Module, facts: Mapping[str, torch.Tensor]) -> dict[str, list[Region]]:
    """The places where a model of vLLM keeps each canonical tensor, or this rank's part of it.

    Args:
        model: Loaded by vLLM.
        facts: Every canonical tensor, on the meta device: its shape and dtype.

    Raises:
        EngineError: A tensor is not copied into parameters as it is, or a parameter is none of these tensors.
    """
    regions = {name: _trace(model, name, meta) for name, meta in facts.items()}
    parameters = dict(model.named_parameters())
    if more := unmapped(model, parameters, regions):
        raise EngineError(
            f"vLLM's {type(model).__name__} has {len(more)} parameters that no tensor of the model goes into, the "
            f"first are {', '.join(more[:3])}: they could not be written or attested; use the engine 'embedded'"
        )
    return regions


def unmapped(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], regions: Mapping[str, Sequence[Region]]
) -> list[str]:
    """Names of floating-point parameters, and of buffers that a checkpoint holds, with elements in no region.

    The rows that pad a vocabulary are in none: vLLM cuts their logits off.
    """
    covered: dict[str, int] = {}
    for held in regions.values():
        for region in held:
            covered[region.parameter] = covered.get(region.parameter, 0) + slices.size(region.piece)
    padded = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if any(kind.__name__ == _PADDED for kind in type(module).__mro__)
    }
    saved = model.state_dict().keys()
    held_besides = [
        name
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point() and not is_default(buffer)
    ]
    made = latent.made_again(model)
    return held_besides + [
        name
        for name, parameter in parameters.items()
        if name not in made
        and parameter.is_floating_point()
        and covered.get(name, 0) < parameter.numel()
        and not (name in padded and name in covered)
    ]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies out of one tensor, without making them."""

    def __init__(self, source: torch.Tensor, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source.untyped_storage()._cdata  # noqa: SLF001 - storages of meta tensors have no address
        self._owners = owners
        self.copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _COPY and args[1].untyped_storage()._cdata == self._source:  # noqa: SLF001 - see above
            target, source = args[0], args[1]
            owner = self._owners.get(target.untyped_storage().data_ptr())
            if owner is not None:
                self.copies.append((owner, target, source))
                return target
        return func(*args, **(kwargs or {}))


def _trace(model: torch.nn.Module, name: str, meta: torch.Tensor) -> list[Region]:
    load: LoadWeights = model.load_weights  # type: ignore[assignment]
    made = latent.made_again(model)
    parameters = ((key, value) for key, value in model.named_parameters() if key not in made)
    owners = {parameter.untyped_storage().data_ptr(): key for key, parameter in parameters}
    watch = _Watch(meta, owners)
    try:
        with watch:
            load([(name, meta)])
    except (RuntimeError, ValueError, LookupError, AssertionError, AttributeError, TypeError) as error:
        raise EngineError(
            f"vLLM's {type(model).__name__} cannot be given {name!r} alone ({type(error).__name__}: {error}): its "
            "weights cannot be changed while it generates; use the engine 'embedded'"
        ) from error
    found = [_region(name, meta, owner, target, source) for owner, target, source in watch.copies]
    regions = [region for region in found if slices.size(region.piece)]
    if any(slices.overlap(one.piece, other.piece) for index, one in enumerate(regions) for other in regions[:index]):
        raise EngineError(
            f"vLLM's {type(model).__name__} copies values of {name!r} into its parameters more than once: it holds "
            "that tensor in a form of its own, which cannot be written or attested; use the engine 'embedded'"
        )
    return regions


def _region(name: str, meta: torch.Tensor, owner: str, target: torch.Tensor, source: torch.Tensor) -> Region:
    start = _place(int(source.storage_offset()), tuple(meta.shape))
    piece = TensorSlice(name=name, start=start, shape=tuple(source.shape))
    if source.stride() != meta.stride() or not slices.contains(slices.whole(name, tuple(meta.shape)), piece):
        raise EngineError(
            f"vLLM copies {name!r} of shape {tuple(meta.shape)} into {owner!r} turned or folded (shape "
            f"{tuple(source.shape)}, strides {source.stride()}): not supported; use the engine 'embedded'"
        )
    return Region(piece=piece, parameter=owner, offset=int(target.storage_offset()), stride=tuple(target.stride()))


def _place(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index of the element at an offset of a contiguous tensor."""
    return tuple(offset // math.prod(shape[dim + 1 :]) % size for dim, size in enumerate(shape))
