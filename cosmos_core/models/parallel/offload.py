"""Keeps what layers save for their backward pass in the machine's memory (`policy.parallel.offload_activations`).

On CUDA copies go by a stream of their own, into page-locked memory and back, beside the layers that compute: a layer's
tensors are on the device until the next but one begins, and come back while the layer after it goes backward. Elsewhere
they are copied at once. What is not a layer's own stays: weights, their casts, and what all layers are given.

Deviation from torch's `save_on_cpu`, which copies each saved view for itself, weights too, and waits for each copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from cosmos_core.models.parallel.forwards import surround

_LEAST_BYTES: Final = 1 << 12
"""Smaller tensors are not worth a copy."""
_MOST_WASTE: Final = 4
"""Of a storage that is as many times as large as what is saved of it, the tensor stays."""
cuda: Final[Any] = torch.cuda
_streams: Final[dict[torch.device, Any]] = {}


def offload(layers: Sequence[nn.Module]) -> None:
    """Let layers that run one after the other keep what they save in the machine's memory."""
    last: list[weakref.ref[_Saved]] = []

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        _, *shared = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        saved = _Saved(before=last.pop() if last else None, shared={_key(each) for each in shared})
        if (before := saved.present_before()) is not None and (earlier := before.present_before()) is not None:
            earlier.leave()
        last.append(weakref.ref(saved))
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return inner(*args, **kwargs)

    for layer in layers:
        surround(layer, around)


@attrs.define(eq=False)
class _Copy:
    """A storage that a layer saves parts of; `here` on its device while it is there, `done` when it was copied."""

    device: torch.device
    host: torch.Tensor
    here: torch.Tensor | None
    done: Any
    uses: int = 0


@attrs.define(eq=False, weakref_slot=True)
class _Saved:
    """The storages of one forward of a layer; those of the layer before it are brought with its own."""

    before: weakref.ref[_Saved] | None
    shared: set[int]
    copies: dict[tuple[int, int], _Copy] = attrs.field(factory=dict)

    def present_before(self) -> _Saved | None:
        return None if self.before is None else self.before()

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < _LEAST_BYTES or storage.nbytes() > _MOST_WASTE * tensor.nbytes
        if type(tensor) is not torch.Tensor or is_small or _key(tensor) in self.shared or _is_weight(tensor):
            return tensor.detach()
        key = _key(tensor), tensor._version  # noqa: SLF001 - what is changed in place since is another content
        if key not in self.copies:
            here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.empty(len(here), dtype=torch.uint8, pin_memory=here.is_cuda)
            self.copies[key] = _Copy(device=tensor.device, host=host, here=here, done=_copy(host, here))
        self.copies[key].uses += 1
        return key, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

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

    def bring(self) -> None:
        """Begin to copy to the device what is still to be used."""
        for copy in self.copies.values():
            if copy.here is None and copy.uses:
                copy.here = torch.empty_like(copy.host, device=copy.device)
                copy.done = _copy(copy.here, copy.host)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the identity of a storage


def _is_weight(tensor: torch.Tensor) -> bool:
    """True of a view or a cast of a parameter."""
    if isinstance(tensor._base, nn.Parameter):  # noqa: SLF001 - the tensor that it is a view of
        return True
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad" and isinstance(node.variable, nn.Parameter)  # type: ignore[union-attr]


def _copy(target: torch.Tensor, source: torch.Tensor) -> Any:
    """Copy after what the device has been given to do so far; the event of its end, where it goes on by itself."""
    device = source.device if source.is_cuda else target.device
    if device.type != "cuda":
        target.copy_(source)
        return None
    stream = _streams.setdefault(device, cuda.Stream(device))
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


def _wait(done: Any, tensor: torch.Tensor) -> None:
    """Let what the device is given from now on come after a copy."""
    if done is not None:
        cuda.current_stream(tensor.device).wait_event(done)
