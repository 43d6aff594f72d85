"""Counter-based random numbers: a draw is a function of its place, not of what was drawn before.

splitmix64 of (request seed, sample index, unit index), computed for a whole batch in int64 wrap-around arithmetic.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
"""

from __future__ import annotations

from typing import Final

import torch

_MASK: Final = (1 << 64) - 1
_WEYL: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def sample_key(seed: int, index: int) -> int:
    """The int64 key of sample `index` of a request with `seed` (any integers)."""
    mixed = _mix((_mix(seed + _WEYL) ^ index) + _WEYL)
    return _signed(mixed)


def uniforms(keys_R: torch.Tensor, units_R: torch.Tensor) -> torch.Tensor:
    """Draws in [0, 1), float64 [R].

    Args:
        keys_R: int64 keys of `sample_key`.
        units_R: int64 index of the unit to draw within each completion.
    """
    mixed = torch.add(keys_R, units_R + 1, alpha=_SIGNED_WEYL)
    for shift, factor in _SIGNED_FACTORS:
        mixed = _xor_shift(mixed, shift).mul_(factor)
    mixed = _xor_shift(mixed, 31)
    return ((mixed >> 11) & ((1 << 53) - 1)).to(torch.float64).mul_(2.0**-53)


def _mix(value: int) -> int:
    value &= _MASK
    for shift, factor in _FACTORS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _xor_shift(value: torch.Tensor, shift: int) -> torch.Tensor:
    """`value ^ (value >>> shift)`: torch shifts arithmetically, so the sign's copies are masked off."""
    return (value >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(value)


_SIGNED_WEYL: Final = _signed(_WEYL)
_SIGNED_FACTORS: Final = tuple((shift, _signed(factor)) for shift, factor in _FACTORS)
