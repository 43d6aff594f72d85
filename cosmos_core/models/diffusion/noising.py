"""The points at which a sample is learned: their times, and the noise of each.

Source: flow matching (arXiv:2210.02747); logit-normal times and their shift (arXiv:2403.03206, section 3.1 and
equation 23); log-normal noise levels (arXiv:2206.00364, table 1), t = σ / (1 + σ).

Shape legend: N decisions, C channels, T latent frames, H and W latent height and width.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch

from cosmos_core.models.diffusion.options import DiffusionOptions

LEAST: Final = 1e-4
"""Times are kept this far from 0 and 1, where nothing is noisy or nothing is left."""


def draw_times(options: DiffusionOptions, number: int, generator: torch.Generator) -> torch.Tensor:
    """So many times, float32 [N], in (0, 1), by the law, mean, standard deviation and shift of the options."""
    if options.times == "uniform":
        times_N = torch.rand(number, generator=generator)
    else:
        # Both are the logistic function: of the drawn number, or of the logarithm of σ.
        times_N = torch.sigmoid(options.times_mean + options.times_std * torch.randn(number, generator=generator))
    times_N = options.times_shift * times_N / (1 + (options.times_shift - 1) * times_N)
    return times_N.clamp(LEAST, 1 - LEAST)


def noise_of(seed: int, decision: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The noise of one regression, float32 on the CPU: drawn from the two numbers alone."""
    return torch.randn(shape, generator=generator_of(seed, decision))


def generator_of(seed: int, number: int) -> torch.Generator:
    """A generator that two numbers seed; neighbouring numbers give streams that have nothing in common."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
