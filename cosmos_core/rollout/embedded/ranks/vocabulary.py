"""Logits of a vocabulary that is split over ranks, made whole.

Shape legend: R rows, V vocabulary, P ranks.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.distributed as dist
from torch import nn


class Vocabulary:
    """Which of the tokens the module's output layer gives the logits of on this rank.

    Args:
        num_tokens: Of the whole vocabulary.
        group: The ranks.
    """

    def __init__(self, num_tokens: int, group: dist.ProcessGroup) -> None:
        self._num_tokens: Final = num_tokens
        self._group: Final = group
        self._size: Final = dist.get_world_size(group)
        # All parts are as large but the last, as the policy's plan splits them.
        self._most: Final = math.ceil(num_tokens / self._size)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] from each rank's part of them; every rank calls it."""
        if logits.shape[-1] == self._num_tokens:
            return logits
        padded = nn.functional.pad(logits, (0, self._most - logits.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat(parts, dim=-1)[..., : self._num_tokens]
