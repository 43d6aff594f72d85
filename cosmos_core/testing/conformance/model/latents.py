"""Payloads of latents that the kit makes itself, and their arrays as tensors.

Shape legend: N decisions of a payload, C channels, T latent frames, H and W latent height and width.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import torch

from cosmos_core.protocols import Canvas
from cosmos_core.types import Array, Payload

KIND: Final = "latents"


def array(values: torch.Tensor) -> Array:
    """A tensor as it travels."""
    held = np.asarray(values.numpy(), order="C")
    return Array(dtype=str(held.dtype), shape=held.shape, data=held.tobytes())


def tensor(payload: Payload, name: str) -> torch.Tensor:
    """An array of a payload."""
    held = payload.arrays[name]
    return torch.from_numpy(np.frombuffer(bytes(held.data), held.dtype).reshape(held.shape).copy())


def drawn(canvas: Canvas, number: int, seed: int) -> torch.Tensor:
    """Latents from noise, float32 [number, C, T, H, W], with the frames that the canvas gives in place."""
    latents = torch.randn(number, *canvas.shape, generator=torch.Generator().manual_seed(seed))
    if canvas.given is None or canvas.is_given_T is None:
        return latents
    return torch.where(canvas.is_given_T[:, None, None], canvas.given, latents)


def walked(prompt: Payload, canvas: Canvas, *, number: int, guidance: float, seed: int = 0) -> Payload:
    """Transitions whose states and steps are made up; the last has an offset, too."""
    generator = torch.Generator().manual_seed(seed)
    places_N = torch.arange(number, dtype=torch.int32)
    steps = torch.rand(number, 3, generator=generator) + torch.tensor([0.5, -1.0, 0.3])
    offsets = torch.zeros(number, *canvas.shape)
    offsets[-1] = 0.1
    made = {
        "states": drawn(canvas, number + 1, seed + 1),
        "places": torch.stack([places_N, places_N + 1], 1),
        "times": torch.linspace(1.0, 0.2, number),
        "steps": steps,
        "offsets": offsets,
        "guidance": torch.tensor(guidance),
    }
    arrays = {name: array(values) for name, values in made.items()}
    return attrs.evolve(prompt, arrays={**prompt.arrays, **arrays})


def mean(values_N: torch.Tensor, canvas: Canvas) -> torch.Tensor:
    """The mean [N] of [N, C, T, H, W] over what is decided: all but the frames that the canvas gives."""
    if canvas.is_given_T is not None:
        values_N = values_N[:, :, ~canvas.is_given_T]
    return values_N.flatten(1).mean(1)
