"""Where vLLM keeps each canonical tensor: fused, stacked and padded, found by watching it load.

A model's `load_weights` knows how tensors of a checkpoint go into its parameters. It is run once with tensors that hold
nothing, and every copy that it would make is noted instead of made: from which box of the tensor, to which view of
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
from cosmos_core.weights.digest import add_digests, combine, tensor_digest

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_COPY: Final = torch.ops.aten.copy_.default


@attrs.frozen(kw_only=True)
class Region:
    """A box of a canonical tensor, and the view of a parameter that holds it.

    Attributes:
        piece: The box.
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


class LoadedWeights:
    """Canonical tensors as they lie in a model of vLLM."""

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find the regions.

        Args:
            model: Loaded by vLLM.
            tensors: Every canonical tensor; only their shapes and dtypes count.

        Raises:
            EngineError: A tensor is not copied into parameters as it is, or not all of it.
        """
        self._model: Final = model
        self._facts: Final = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self._regions: Final = {name: _trace(model, name, meta) for name, meta in self._facts.items()}

    @property
    def facts(self) -> Mapping[str, torch.Tensor]:
        """Shape and dtype of each tensor."""
        return self._facts

    def copy(self, pieces: Iterable[tuple[TensorSlice, torch.Tensor]]) -> None:
        """Write slices into the live parameters."""
        parameters = dict(self._model.named_parameters())
        for piece, data in pieces:
            for region in self._regions[piece.name]:
                part = slices.overlap(piece, region.piece)
                if part is not None:
                    view = region.view(parameters)
                    view[slices.within(part, region.piece)].copy_(data[slices.within(part, piece)])

    def digest(self) -> str:
        """The digest of what the live parameters hold."""
        parameters = dict(self._model.named_parameters())
        parts = (
            {name: self._part_digest(region, meta, parameters)}
            for name, meta in self._facts.items()
            for region in self._regions[name]
        )
        return combine(add_digests(parts))

    @staticmethod
    def _part_digest(region: Region, meta: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> int:
        # vLLM may hold a bias in more bits than it was given: what was given comes back exactly.
        values = region.view(parameters).to(meta.dtype)
        return tensor_digest(region.piece.name, values, start=region.piece.start, shape=tuple(meta.shape))


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
    owners = {parameter.untyped_storage().data_ptr(): key for key, parameter in model.named_parameters()}
    watch = _Watch(meta, owners)
    try:
        with watch:
            load([(name, meta)])
    except (RuntimeError, ValueError, LookupError, AssertionError, AttributeError, TypeError) as error:
        raise EngineError(
            f"vLLM's {type(model).__name__} cannot be given {name!r} alone ({type(error).__name__}: {error}): its "
            "weights cannot be changed while it generates; use the engine 'embedded'"
        ) from error
    regions = [_region(name, meta, owner, target, source) for owner, target, source in watch.copies]
    found = sum(slices.size(region.piece) for region in regions)
    is_disjoint = not any(
        slices.overlap(one.piece, other.piece) for index, one in enumerate(regions) for other in regions[:index]
    )
    if found != meta.numel() or not is_disjoint:
        raise EngineError(
            f"vLLM's {type(model).__name__} copies {found} of the {meta.numel()} values of {name!r} into its "
            "parameters: it holds that tensor in a form of its own, which cannot be written or attested; use the "
            "engine 'embedded'"
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
