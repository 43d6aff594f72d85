"""Keeps what layers save for their backward pass in the machine's memory (`policy.parallel.offload_activations`).

On CUDA copies go by a stream of their own, into page-locked memory and back, beside the layers that compute: a layer's
tensors are on the device until the next but one begins, and come back while the layer after it goes backward. Elsewhere
they are copied at once. What is not a layer's own stays: weights, their casts, and what all layers are given.

A cast of a weight is told by its layout and its dtype. An activation of the same size may be taken for it: then the
cast goes in its place, so that neither memory holds more.

Deviation from torch's `save_on_cpu`, which copies each saved view for itself, weights too, and waits for each copy.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from cosmos_core.models.parallel.forwards import surround

_LEAST_BYTES: Final = 1 << 12
"""Smaller tensors are not worth a copy."""
_MOST_WASTE: Final = 4
"""Of a storage that is as many times as large as what is saved of it, the tensor stays."""
BLOCK_BYTES: Final = 1 << 24
"""Memory that is page-locked at once. torch keeps it by powers of two: blocks of one size serve all lengths of rows."""
cuda: Final[Any] = torch.cuda


def offload(layers: Sequence[nn.Module]) -> None:
    """Let layers that run one after the other keep what they save in the machine's memory."""
    last: list[weakref.ref[_Saved]] = []
    results: set[int] = set()

    def around(layer: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        saved = _Saved.of(layer, before=last.pop() if last else None)
        # All layers share what they are given beside the first tensor, unless the layer before has made it.
        saved.stays.update(set(list(_keys((args, kwargs)))[1:]) - results)
        if (before := saved.present_before()) is not None and (earlier := before.present_before()) is not None:
            earlier.leave()
        last.append(weakref.ref(saved))
        with saved_tensors_hooks(saved.pack, saved.unpack):
            found = inner(*args, **kwargs)
        results.clear()
        results.update(_keys(found))
        return found

    for layer in layers:
        surround(layer, functools.partial(around, layer))


@attrs.define(eq=False)
class _Copy:
    """A storage that a layer saves parts of; `here` on its device while it is there, `done` when it was copied."""

    device: torch.device
    host: Sequence[torch.Tensor]
    here: torch.Tensor | None
    done: Any
    uses: int = 0


@attrs.define(eq=False, weakref_slot=True)
class _Saved:
    """The storages of one forward of a layer; those of the layer before it are brought with its own."""

    before: weakref.ref[_Saved] | None
    stays: set[int]
    casts: Counter[tuple[torch.dtype, tuple[int, ...]]]
    gathered_later: Sequence[nn.Module]
    copies: dict[tuple[int, int], _Copy] = attrs.field(factory=dict)
    room: torch.Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.uint8))

    @classmethod
    def of(cls, layer: nn.Module, before: weakref.ref[_Saved] | None) -> _Saved:
        weights = list(_weights(layer))
        # Experts may be cast one by one.
        experts = [part for each in weights if each.dim() == 3 for part in each.unbind()]
        casts = Counter((each.dtype, tuple(each.shape)) for each in (*weights, *experts))
        later = [part for part in layer.modules() if part is not layer and isinstance(part, FSDPModule)]
        return cls(before, {_key(each) for each in weights}, casts, later)

    def present_before(self) -> _Saved | None:
        return None if self.before is None else self.before()

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < _LEAST_BYTES or storage.nbytes() > _MOST_WASTE * tensor.nbytes
        if type(tensor) is not torch.Tensor or is_small or self._stays(tensor):
            return tensor.detach()
        key = _key(tensor), tensor._version  # noqa: SLF001 - what is changed in place since is another content
        if key not in self.copies:
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = self._take(here)
            self.copies[key] = _Copy(tensor.device, host, here, done=_copy(host, _pieces(here, host)))
        self.copies[key].uses += 1
        return key, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def _stays(self, tensor: torch.Tensor) -> bool:
        key = _key(tensor)
        later = (_key(each) for part in self.gathered_later for each in _weights(part))
        if key not in self.stays and (key in later or self._is_cast(tensor)):
            self.stays.add(key)
        return key in self.stays

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        """True of as many tensors laid out like a weight or its transpose, of another dtype, as there are weights."""
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            return False
        shape = tuple(tensor.size(dim) for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        for weight, left in self.casts.items():
            if left and weight[1] == shape and weight[0] != tensor.dtype:
                self.casts[weight] -= 1
                return True
        return False

    def _take(self, here: torch.Tensor) -> list[torch.Tensor]:
        """Memory of the machine for what lies on a device."""
        found, size = [], len(here)
        while size:
            if not len(self.room):
                self.room = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=here.is_cuda)
            found.append(self.room[:size])
            self.room = self.room[size:]
            size -= len(found[-1])
        return found

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        key, dtype, *place = packed
        copy = self.copies[key]
        copy.uses = max(copy.uses, 1)
        self.bring()
        if (before := self.present_before()) is not None:
            before.bring()
        here = copy.here
        assert here is not None, "it was brought"
        _wait(copy.done, here)
        copy.uses -= 1
        if not copy.uses:
            copy.here = None
        return torch.empty(0, dtype=dtype, device=here.device).set_(here.untyped_storage(), *place)

    def leave(self) -> None:
        """Give the device's copies up, once those in the machine's memory are whole."""
        for copy in self.copies.values():
            if copy.here is not None:
                _wait(copy.done, copy.here)
                copy.here = None

    def __del__(self) -> None:
        # What was brought and not used may still be on its way: nobody else is to have its memory before.
        self.leave()

    def bring(self) -> None:
        """Begin to copy to the device what is still to be used."""
        for copy in self.copies.values():
            if copy.here is None and copy.uses:
                copy.here = torch.empty(sum(map(len, copy.host)), dtype=torch.uint8, device=copy.device)
                copy.done = _copy(_pieces(copy.here, copy.host), copy.host)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the identity of a storage


def _keys(tree: Any) -> Iterator[int]:
    return (_key(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    """This process's weights, which FSDP has gathered before the module's forward."""
    with torch.no_grad():
        yield from (each.to_local() if isinstance(each, DTensor) else each for each in module.parameters())


def _pieces(here: torch.Tensor, host: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.split(here, [len(each) for each in host])


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
    """Copy after what the device has been given to do so far; the event of its end, where it goes on by itself."""
    device = sources[0].device if sources[0].is_cuda else targets[0].device
    if device.type != "cuda":
        _copy_each(targets, sources)
        return None
    stream = _stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):
        _copy_each(targets, sources)
        return stream.record_event()


@functools.cache
def _stream(device: torch.device) -> Any:
    return cuda.Stream(device)


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _wait(done: Any, tensor: torch.Tensor) -> None:
    """Let what the device is given from now on come after a copy."""
    if done is not None:
        cuda.current_stream(tensor.device).wait_event(done)
