"""Whether tensors are the same bit by bit: zeros of two signs differ, and what is not a number equals itself."""

from __future__ import annotations

from typing import Final

import torch

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; compared where the first one is."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    bits = _BITS[found.element_size()]
    return torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits).to(found.device))
