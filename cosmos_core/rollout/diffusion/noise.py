"""Noise as a function of its place: of the request's seed, the sample and the step, and of nothing else in flight.

Philox (Salmon et al., SC 2011), a counter-based generator, is keyed with the place; numbers are drawn on the CPU.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from cosmos_core.rollout.serving.randomness import sample_key

_WORD: Final = 1 << 64
_GROUP: Final = -1
"""Index of what is drawn for all samples of a request."""


def noise(seed: int, index: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal, float32, on the CPU.

    Args:
        seed: Of the request.
        index: Of the sample.
        step: That it follows; -1 for the first state.
        shape: Its shape.
    """
    return torch.from_numpy(_generator(seed, index, step).standard_normal(shape, dtype=np.float32))


def group_draw(seed: int, number: int) -> int:
    """One of `number` outcomes, the same for all samples of a request."""
    return int(_generator(seed, _GROUP, 0).integers(number))


def sample_seed(seed: int, index: int) -> int:
    """A seed of a sample's own, below 2^63."""
    return int(_generator(seed, index, _WORD - 2).integers(1 << 63))


def _generator(seed: int, index: int, step: int) -> np.random.Generator:
    key = np.array([sample_key(seed, index) % _WORD, (step + 1) % _WORD], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
