"""Draw one token a row: temperature, top-k, top-p, greedy; and the log-prob under what was drawn from.

Shape legend: R rows (sequences), V vocabulary, B a block of the vocabulary.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch

from cosmos_core.rollout.serving.randomness import uniforms

_BLOCK: Final = 128
"""Vocabularies above eight blocks are searched in two levels: a float64 prefix sum of all of V is the slow part."""


@attrs.frozen(kw_only=True, eq=False)
class Drawing:
    """How to draw each row.

    Attributes:
        keys_R: int64 keys of `randomness.sample_key`.
        units_R: int64 index of the unit to draw.
        temperature_R: float32; None where every row's is 1.
        greedy_R: bool; None where no row is greedy.
        top_k_R: int64, V where off; None where every row takes the whole vocabulary.
        top_p_R: float32; given with `top_k_R`.
    """

    keys_R: torch.Tensor
    units_R: torch.Tensor
    temperature_R: torch.Tensor | None = None
    greedy_R: torch.Tensor | None = None
    top_k_R: torch.Tensor | None = None
    top_p_R: torch.Tensor | None = None


def draw(logits_RV: torch.Tensor, drawing: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        logits_RV: float32.
        drawing: How.

    Returns:
        int64 tokens [R]; float32 log-probs [R] of the distribution sampled from. A greedy row's is the model's own
        log-prob at temperature 1, since that of a certain choice says nothing. A row without a proper distribution
        (not finite) has a log-prob that is not finite.
    """
    if drawing.temperature_R is not None:
        logits_RV = logits_RV / drawing.temperature_R[:, None]
    if drawing.top_k_R is not None and drawing.top_p_R is not None:
        logits_RV = _restrict(logits_RV, drawing.top_k_R, drawing.top_p_R)
    probs_RV = torch.softmax(logits_RV, dim=-1)
    tokens_R = _invert(probs_RV, uniforms(drawing.keys_R, drawing.units_R))
    if drawing.greedy_R is not None:
        tokens_R = torch.where(drawing.greedy_R, logits_RV.argmax(-1), tokens_R)
    return tokens_R, probs_RV.gather(1, tokens_R[:, None])[:, 0].log()


def _invert(probs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw."""
    vocabulary = probs_RV.shape[1]
    if vocabulary <= 8 * _BLOCK:
        sums_RV, target_R1 = _sums(probs_RV, uniforms_R)
        return _search(sums_RV, target_R1)[:, 0]
    padding = -vocabulary % _BLOCK
    blocks_RNB = torch.nn.functional.pad(probs_RV, (0, padding)).view(len(probs_RV), -1, _BLOCK)
    mass_RN = blocks_RNB.sum(-1)
    sums_RN, target_R1 = _sums(mass_RN, uniforms_R)
    block_R1 = _search(sums_RN, target_R1)
    # Where in its block the draw falls, as a draw in [0, 1) of its own.
    mass_R1 = mass_RN.gather(1, block_R1).clamp_min(torch.finfo(torch.float32).tiny)
    rest_R1 = (1.0 - (sums_RN.gather(1, block_R1) - target_R1) / mass_R1).clamp_(0.0, 1.0 - 2.0**-53)
    chosen_RB = blocks_RNB.gather(1, block_R1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    sums_RB, target_R1 = _sums(chosen_RB, rest_R1[:, 0])
    return (block_R1 * _BLOCK + _search(sums_RB, target_R1))[:, 0]


def _sums(weights_RN: torch.Tensor, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 prefix sums [R, N], and where the draws fall on their scale [R, 1]."""
    sums_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    return sums_RN, uniforms_R[:, None] * sums_RN[:, -1:]


def _search(sums_RN: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """The interval [R, 1] that a target falls into, never one of weight zero."""
    return torch.searchsorted(sums_RN, target_R1, right=True).clamp_max_(sums_RN.shape[1] - 1)


def _restrict(logits_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Minus infinity outside the top k, then outside the smallest set of them that holds a mass of p."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R[:, None], -torch.inf)
    probs_RV = torch.softmax(sorted_RV, dim=-1)
    before_RV = probs_RV.cumsum(-1, dtype=torch.float64) - probs_RV
    # The first is always kept: before it there is nothing.
    sorted_RV = sorted_RV.masked_fill((before_RV >= top_p_R[:, None]) & (rank_V > 0), -torch.inf)
    return torch.empty_like(logits_RV).scatter_(1, order_RV, sorted_RV)
