"""Counts what a forward keeps for its backward pass, on tensors without storage.

A representative of each kind of layer runs on two lengths, and the difference counts: what does not grow with the
units (weights, their casts) falls away. Autograd tells what it keeps (`saved_tensors_hooks`); what lies in the same
storage counts once. Keys and values are followed from their projections to where they meet queries.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args

import attrs
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_core.models.parallel.expert import is_experts
from cosmos_core.models.parallel.forwards import SAVED
from cosmos_core.models.parallel.plan import KEYS_AND_VALUES
from cosmos_core.protocols.facts import Compute, Kept

_UNTRACEABLE: Final = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What a forward raises that wants values, or an operator that is not known, where there is no storage."""
NO_NUMBERS: Final = (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError)
"""What a forward raises whose sizes do not fit together, or an operator that takes other dtypes."""

_LENGTHS: Final = (64, 128)
BEFORE_LAYERS: Final = -1
AFTER_LAYERS: Final = -2

Forward = Callable[[], object]
Wide: TypeAlias = Mapping[nn.Module, bool]
"""Modules of which each process of `tp` computes results of full width; true if it splits nothing of one: then all that
it keeps counts as its input."""


def kept_by(
    module: nn.Module, layers: Sequence[nn.Module], prepare: Callable[[int], Forward], wide: Wide = MappingProxyType({})
) -> Mapping[int, Mapping[Compute, Kept]]:
    """Count what each layer keeps per unit, by its number; `BEFORE_LAYERS` and `AFTER_LAYERS` for what is round them.

    The module is on the meta device and of no use afterwards; of its layers only representatives are left, in the order
    in which they run. `prepare` makes a forward of the module over so many units. Nothing is counted of what
    cannot run without storage, nor in a dtype in which it does not run. What is kept in float32 is counted at once, in
    another dtype when it is asked for.
    """
    places = (BEFORE_LAYERS, AFTER_LAYERS, *range(len(layers)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    forwards = [prepare(length) for length in _LENGTHS]

    @functools.cache
    def count(compute: Compute) -> Mapping[int, Kept]:
        precision = torch.autocast("cpu", torch.bfloat16) if compute == "autocast" else contextlib.nullcontext()
        try:
            with mode, precision, warnings.catch_warnings():
                # Norms that keep float32 weights under autocast: nothing is computed here.
                warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
                _fill(module, torch.bfloat16 if compute == "bfloat16" else torch.float32)
                short, long = (_Count.of(module, layers, forward, wide) for forward in forwards)
        except _UNTRACEABLE:
            return {}
        except NO_NUMBERS:
            if compute == "float32":
                raise
            # Its numbers fit together: some operator of it takes one dtype only.
            return {}
        return {place: _slope(short, long, place) for place in places}

    return {place: _ByCompute(place, count) for place in places} if count("float32") else {}


class _ByCompute(Mapping[Compute, Kept]):
    """The activations kept at one place, counted when they are asked for."""

    def __init__(self, place: int, count: Callable[[Compute], Mapping[int, Kept]]) -> None:
        self._place: Final = place
        self._count: Final = count

    def __getitem__(self, compute: Compute) -> Kept:
        return self._count(compute)[self._place]

    def __iter__(self) -> Iterator[Compute]:
        return (compute for compute in get_args(Compute) if self._count(compute))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _fill(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module tensors without storage; within the mode that makes them."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _slope(short: _Count, long: _Count, place: int) -> Kept:
    names, units = (field.name for field in attrs.fields(Kept)), _LENGTHS[1] - _LENGTHS[0]
    return Kept(**{name: (long.bytes[place, name] - short.bytes[place, name]) / units for name in names})


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what one forward keeps, by layer and by class, and watches the operators that it calls."""

    def __init__(self, common: set[int], wide: Wide) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[tuple[int, str]] = Counter()
        self._seen = set(common)
        self._made: set[int] = set()
        self._entries: set[int] = set()
        self._inputs: set[int] = set()
        self._heads: set[int] = set()
        self._common = common
        self._place = BEFORE_LAYERS
        self._wide = wide
        self._apart: set[int] = set()
        self._is_inside = False
        self._is_whole = False
        self._is_wide = False
        self._is_routed = False
        self._alive: list[torch.UntypedStorage] = []

    @staticmethod
    def of(module: nn.Module, layers: Sequence[nn.Module], forward: Forward, wide: Wide) -> _Count:
        """Count one forward."""
        count = _Count({_key(parameter) for parameter in module.parameters()}, wide)
        with contextlib.ExitStack() as stack:
            for number, layer in enumerate(layers):
                for handle in count._watch(layer, number):
                    stack.callback(handle.remove)
            stack.enter_context(count)
            stack.enter_context(saved_tensors_hooks(count._keep, lambda tensor: tensor))
            stack.enter_context(torch.enable_grad())
            forward()
        return count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._place >= 0 and func.overloadpacket.__name__ in SAVED:
            for tensor in _tensors(result):
                self._note(tensor, "products", self._made)
                if self._is_routed or self._is_wide or self._is_whole:
                    self._note(tensor, "routed_products" if self._is_routed else "whole_products", self._apart)
        if self._heads:
            self._follow(_tensors((args, kwargs)), _tensors(result))
        return result

    def _follow(self, taken: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Count as keys and values what is made of these alone."""
        own = self._keys(taken) - self._common
        if own and own <= self._heads:
            self._heads |= self._keys(given)

    def _watch(self, layer: nn.Module, number: int) -> Iterator[Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._place = number
            first, *others = [*_tensors(args), *_tensors(kwargs)]
            self._note(first, "entry", self._entries)
            # What all layers share, such as rotary angles, is no layer's own.
            self._common |= self._keys(others)
            self._seen |= self._common

        yield layer.register_forward_pre_hook(enter, with_kwargs=True)
        yield layer.register_forward_hook(self._set(_place=AFTER_LAYERS))
        for name, child in layer.named_modules():
            if is_experts(child):
                yield child.register_forward_pre_hook(self._set(_is_routed=True))
                yield child.register_forward_hook(self._set(_is_routed=False))
            if child in self._wide:
                yield child.register_forward_pre_hook(self._set(_is_wide=True))
                yield child.register_forward_hook(self._set(_is_wide=False))
            if name.rpartition(".")[2] in KEYS_AND_VALUES:
                yield child.register_forward_hook(self._leave_projection)
        for child in layer.children():
            if any(parameter.dim() > 1 for parameter in child.parameters()):
                yield child.register_forward_pre_hook(self._enter_block, with_kwargs=True)
                yield child.register_forward_hook(self._set(_is_inside=False, _is_whole=False))

    def _enter_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._is_inside, self._is_whole = True, self._wide.get(block, False)
        self._inputs |= self._keys([*_tensors(args), *_tensors(kwargs)])

    def _set(self, **flags: Any) -> Callable[..., None]:
        return lambda *_: self.__dict__.update(flags)

    def _leave_projection(self, _: nn.Module, __: Any, result: Any) -> None:
        self._heads |= self._keys(_tensors(result))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_whole or _key(tensor) in self._inputs:
            name = "inputs"
        elif self._is_routed:
            name = "routed"
        elif _key(tensor) in self._heads:
            name = "heads"
        else:
            name = "inner" if self._is_inside else "stream"
        self._note(tensor, name, self._seen)
        return tensor

    def _note(self, tensor: torch.Tensor, name: str, seen: set[int]) -> None:
        new = self._keys([tensor]) - seen
        if new:
            seen |= new
            self.bytes[self._place, name] += tensor.untyped_storage().nbytes()

    def _keys(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        # The address of a freed storage would come again.
        self._alive += [tensor.untyped_storage() for tensor in tensors]
        return {_key(tensor) for tensor in tensors}


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the identity of a storage that has no address


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
