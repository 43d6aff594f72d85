"""Arrays of payloads of kind `latents` as tensors, and what conditions forwards: S sequences side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import array_of
from cosmos_core.types import Payload

KIND: Final = "latents"


def payload_of(tensors: Mapping[str, torch.Tensor], kind: str = KIND) -> Payload:
    """A payload of some tensors."""
    arrays = {name: array_of(tensor.detach().to("cpu").numpy()) for name, tensor in tensors.items()}
    return Payload(kind=kind, arrays=arrays)


def with_tensors(payload: Payload, tensors: Mapping[str, torch.Tensor]) -> Payload:
    """The payload with more arrays, or others in their place."""
    return attrs.evolve(payload, arrays={**payload.arrays, **payload_of(tensors).arrays})


def tensor_of(payload: Payload, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> torch.Tensor:
    """A copy of an array of this dtype and shape, None for dims of any size, as a tensor on the CPU.

    Raises:
        DataError: The payload is of another kind, has no such array, or the array is of another dtype or shape.
    """
    if payload.kind != KIND:
        raise DataError(f"a payload of kind {payload.kind!r}, and a world model takes {KIND!r}")
    array = payload.arrays.get(name)
    if array is None:
        raise DataError(
            f"a payload of latents without the array {name!r}: it has {', '.join(payload.arrays) or 'none'}"
        )
    is_alike = [wanted in (None, found) for wanted, found in zip(shape, array.shape, strict=False)]
    wanted_dtype = str(dtype).removeprefix("torch.")
    if array.dtype != wanted_dtype or len(array.shape) != len(shape) or not all(is_alike):
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise DataError(
            f"the array {name!r} is {array.dtype} {list(array.shape)}, and must be {wanted_dtype} [{wanted_shape}]"
        )
    return torch.from_numpy(np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(array.shape).copy())


Conditions: TypeAlias = Mapping[str, torch.Tensor]
"""What conditions the denoising of a payload, by name."""

MOST_KEPT: Final = 16
"""Prompts whose conditions stay on a device: the text of one may be 100 MiB."""


def side_by_side(each: Sequence[Conditions]) -> dict[str, torch.Tensor]:
    """Conditions [S, ...] of several payloads; of one payload, however often, a view and no copy.

    What some have and others have not, such as frames that are given, is zero for the others.
    """
    names = {name: one[name] for one in each for name in one}
    if all(one is each[0] for one in each):
        return {name: like[None].expand(len(each), *like.shape) for name, like in names.items()}
    zeros = {name: torch.zeros_like(like) for name, like in names.items() if any(name not in one for one in each)}
    return {name: torch.stack([one[name] if name in one else zeros[name] for one in each]) for name in names}


def placed(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A condition where and as a transformer takes it; what is no number with a fraction keeps its dtype."""
    return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)


class Resident:
    """Conditions on the device where they are used, at every step of a denoising.

    Of at most `most` prompts, those that were used last, and of none that nobody else holds any more.
    """

    def __init__(self, conditioning: Callable[[Payload], Conditions], most: int = MOST_KEPT) -> None:
        self._conditioning = conditioning
        self._most = most
        self._kept: WeakKeyDictionary[Payload, Conditions] = WeakKeyDictionary()
        self._at: tuple[torch.device, torch.dtype] | None = None

    def of(self, prompts: Sequence[Payload], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Conditions [S, ...] of some prompts."""
        if self._at != (device, dtype):
            self._kept.clear()
            self._at = device, dtype
        found: dict[Payload, Conditions] = {}
        for prompt in dict.fromkeys(prompts):
            known = self._kept.pop(prompt, None)
            if known is None:
                # What an engine keeps in inference mode could not be trained with.
                with torch.inference_mode(mode=False), torch.no_grad():
                    known = {name: placed(each, device, dtype) for name, each in self._conditioning(prompt).items()}
            # Those that were used last stand last.
            self._kept[prompt] = found[prompt] = known
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
        return side_by_side([found[prompt] for prompt in prompts])
