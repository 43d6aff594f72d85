"""Cosmos' blocks over slices of the tokens (context parallelism).

Shape legend: B latents, S tokens of all processes, U of this one, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn

from cosmos_core.models.diffusion import TokenSlices, spread_blocks
from cosmos_core.models.parallel.forwards import surround


class SlicedAttention:
    """Self-attention in which each process attends for some heads (a processor of diffusers' `Attention`).

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
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention of this process's tokens [B, U, H · D] to those of all."""
        assert encoder_hidden_states is None
        assert attention_mask is None
        assert image_rotary_emb is not None
        query, key, value = (
            each(hidden_states).unflatten(2, (attn.heads, -1)) for each in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = (_turned(each, image_rotary_emb) for each in (attn.norm_q(query), attn.norm_k(key)))
        output = self._slices.attend(query, key, value).flatten(2).type_as(query)
        mapped: torch.Tensor = attn.to_out[1](attn.to_out[0](output))
        return mapped


def spread(module: nn.Module, slices: TokenSlices) -> None:
    """Cut tokens before the first block, join them after the last linear layer, and exchange heads in between."""
    transformer: Any = module
    for block in transformer.transformer_blocks:
        block.attn1.set_processor(SlicedAttention(slices))

    def beside(
        text: torch.Tensor,
        times_BSD: torch.Tensor,
        shifts_BSD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        places_BSD: torch.Tensor | None,
        *others: Any,
    ) -> tuple[Any, ...]:
        places = None if places_BSD is None else slices.cut(places_BSD)
        angles = tuple(slices.cut(each, 0) for each in rope)
        return text, slices.cut(times_BSD), slices.cut(shifts_BSD), angles, places, *others

    def normed(
        inner: Callable[..., torch.Tensor], hidden: torch.Tensor, times: torch.Tensor, shifts: torch.Tensor
    ) -> torch.Tensor:
        return inner(hidden, slices.cut(times), slices.cut(shifts))

    def joined(inner: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        return slices.join(inner(hidden))

    spread_blocks(list(transformer.transformer_blocks), slices, beside)
    surround(transformer.norm_out, normed)
    surround(transformer.proj_out, joined)


def _turned(states_BUHD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    turn: Any = apply_rotary_emb
    turned: torch.Tensor = turn(states_BUHD.transpose(1, 2), rope, use_real=True, use_real_unbind_dim=-2)
    return turned.transpose(1, 2)
