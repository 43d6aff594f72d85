"""splitmix64: numbers that look random, each a function of its place alone.

Tensors are int64, whose arithmetic wraps around as that of the generator's unsigned numbers does.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
"""

from __future__ import annotations

from typing import Final

import torch

WEYL: Final = 0x9E3779B97F4A7C15
"""What the generator's state grows by."""

_MASK: Final = (1 << 64) - 1
_FACTORS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def signed(value: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(value: int) -> int:
    """The output of a state, below 2^64; of a state beyond that its lowest 64 bits count."""
    value &= _MASK
    for shift, factor in _FACTORS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def mix_all(states: torch.Tensor) -> torch.Tensor:
    """The output of each state, int64 as the states are."""
    mixed = states
    for shift, factor in _SIGNED_FACTORS:
        mixed = _xor_shift(mixed, shift).mul_(factor)
    return _xor_shift(mixed, 31)


def _xor_shift(value: torch.Tensor, shift: int) -> torch.Tensor:
    """`value ^ (value >>> shift)`: torch shifts arithmetically, so the sign's copies are masked off."""
    return (value >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(value)


_SIGNED_FACTORS: Final = tuple((shift, signed(factor)) for shift, factor in _FACTORS)
