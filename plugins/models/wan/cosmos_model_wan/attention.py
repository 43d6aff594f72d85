"""Wan's blocks over slices of the tokens (context parallelism).

Shape legend: B latents, U tokens of this process, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cosmos_core.models.diffusion import TokenSlices, spread_blocks
from cosmos_core.models.parallel.forwards import surround


class SlicedAttention:
    """Self-attention of `WanAttention` in which each process attends for some heads (a processor of diffusers).

    Args:
        slices: How tokens are cut.
    """

    def __init__(self, slices: TokenSlices) -> None:
        self._slices = slices

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of this process's tokens [B, U, H · D] to those of all."""
        assert encoder_hidden_states is None
        assert attention_mask is None
        assert rotary_emb is not None
        # The norm goes over all heads, so it comes before they part.
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        rows = [each.unflatten(2, (attn.heads, -1)) for each in (query, key, attn.to_v(hidden_states))]
        cos, sin = rotary_emb
        turned = [_turned(each, cos[..., 0::2], sin[..., 1::2]) for each in rows[:2]]
        output = self._slices.attend(turned[0], turned[1], rows[2]).flatten(2).type_as(rows[2])
        mapped: torch.Tensor = attn.to_out[1](attn.to_out[0](output))
        return mapped


def spread(module: nn.Module, slices: TokenSlices) -> None:
    """Cut tokens before the first block, join them after the last linear layer, and exchange heads in between."""
    transformer: Any = module
    for block in transformer.blocks:
        block.attn1.set_processor(SlicedAttention(slices))

    def beside(text: torch.Tensor, times: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        return text, times, tuple(slices.cut(each) for each in rope)

    def joined(inner: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        return slices.join(inner(hidden))

    spread_blocks(list(transformer.blocks), slices, beside)
    surround(transformer.proj_out, joined)


def _turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs of dims turned by their angles."""
    even, odd = states[..., 0::2], states[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(states)
