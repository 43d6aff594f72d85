"""Conditions of forwards: side by side for a batch, and on the device for as long as a prompt is denoised.

Shape legend: S sequences, N decisions, L tokens of the text, E their width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import torch

from cosmos_core.types import Payload

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

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, prompts: Sequence[Payload], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Conditions [S, ...] of some prompts.

        Raises:
            DataError: The arrays of a payload do not fit the model.
        """
        if self._at != (device, dtype):
            self._kept.clear()
            self._at = device, dtype
        found = {id(prompt): self._one(prompt, device, dtype) for prompt in dict.fromkeys(prompts)}
        return side_by_side([found[id(prompt)] for prompt in prompts])

    def _one(self, prompt: Payload, device: torch.device, dtype: torch.dtype) -> Conditions:
        found = self._kept.pop(prompt, None)
        if found is None:
            # What an engine keeps in inference mode could not be trained with.
            with torch.inference_mode(mode=False), torch.no_grad():
                found = {name: placed(each, device, dtype) for name, each in self._conditioning(prompt).items()}
        # Those that were used last stand last.
        self._kept[prompt] = found
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return found
