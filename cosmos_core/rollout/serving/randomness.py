"""Counter-based random numbers: a draw is a function of its place, not of what was drawn before.

splitmix64 of (request seed, sample index, unit index), computed for a whole batch.
"""

from __future__ import annotations

from typing import Final

import torch

from cosmos_core.weights.digest import WEYL, mix, mix_all, signed

_SIGNED_WEYL: Final = signed(WEYL)


def sample_key(seed: int, index: int) -> int:
    """The int64 key of sample `index` of a request with `seed` (any integers)."""
    return signed(mix((mix(seed + WEYL) ^ index) + WEYL))


def uniforms(keys_R: torch.Tensor, units_R: torch.Tensor) -> torch.Tensor:
    """Draws in [0, 1), float64 [R], of int64 keys of `sample_key` and int64 indices of units within each completion."""
    mixed = mix_all(torch.add(keys_R, units_R + 1, alpha=_SIGNED_WEYL))
    return ((mixed >> 11) & ((1 << 53) - 1)).to(torch.float64).mul_(2.0**-53)
