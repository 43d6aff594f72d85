"""Draw one token a row: temperature, top-k, top-p, greedy; and the log-prob under what was drawn from.

Shape legend: R rows (sequences), V vocabulary, B a block of the vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import attrs
import torch

from cosmos_core.protocols import Sampling
from cosmos_core.rollout.serving.randomness import uniforms
from cosmos_core.rollout.serving.tokens import TokenSequence

_BLOCK: Final = 128
"""Vocabularies above eight blocks are searched in two levels: a float64 prefix sum of all of V is the slow part."""


@attrs.frozen(kw_only=True, eq=False)
class RowSampling:
    """Sampling parameters of each row.

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


def draw(logits_RV: torch.Tensor, row_sampling: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        logits_RV: float32.
        row_sampling: How.

    Returns:
        int64 tokens [R]; float32 log-probs [R] of the distribution sampled from. A greedy row's is the model's own
        log-prob at temperature 1, since that of a certain choice says nothing. A row without a proper distribution
        (not finite) has a log-prob that is not finite.
    """
    if row_sampling.temperature_R is not None:
        logits_RV = logits_RV / row_sampling.temperature_R[:, None]
    if row_sampling.top_k_R is not None and row_sampling.top_p_R is not None:
        logits_RV = _restrict(logits_RV, row_sampling.top_k_R, row_sampling.top_p_R)
    probs_RV = torch.softmax(logits_RV, dim=-1)
    tokens_R = _invert(probs_RV, uniforms(row_sampling.keys_R, row_sampling.units_R))
    if row_sampling.greedy_R is not None:
        tokens_R = torch.where(row_sampling.greedy_R, logits_RV.argmax(-1), tokens_R)
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


_TOKEN, _PLACE, _POSITION, _UNIT, _KEY, _TOP_K, _GREEDY = range(7)
_TEMPERATURE, _TOP_P = range(2)


class SamplingFeatures(enum.Flag):
    """Features that some sequence in flight needs of the sampler beyond plain draws at temperature 1."""

    NONE = 0
    GREEDY = enum.auto()
    SCALED = enum.auto()
    RESTRICTED = enum.auto()

    @classmethod
    def of(cls, sampling: Sampling) -> SamplingFeatures:
        """The features that one request needs."""
        features = cls.GREEDY if sampling.temperature == 0 else cls.NONE
        if sampling.temperature not in (0, 1):
            features |= cls.SCALED
        if sampling.top_k > 0 or sampling.top_p < 1:
            features |= cls.RESTRICTED
        return features


class SlotNumbers:
    """Newest token, its place in the sequence and its position, next unit and random key, sampling of each slot.

    A position is what the model rotates by: behind a prompt that shows images it is not the place in the sequence.
    """

    def __init__(self, num_slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._ints = torch.zeros(num_slots, 7, dtype=torch.int64, device=device)
        self._floats = torch.ones(num_slots, 2, dtype=torch.float32, device=device)
        self.places = torch.arange(num_slots, device=device)

    def place(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Fill slots `first`, …: each will feed its last unit, then draw the next."""
        ints, floats = [], []
        for sequence in sequences:
            sampling = sequence.parent.request.sampling
            top_k = sampling.top_k or self._vocabulary
            is_greedy = int(sampling.temperature == 0)
            place = len(sequence.tokens) - 1
            position = place + sequence.parent.offset
            ints.append((sequence.tokens[-1], place, position, sequence.num_generated, sequence.key, top_k, is_greedy))
            floats.append((sampling.temperature or 1.0, sampling.top_p))
        last = first + len(sequences)
        self._ints[first:last] = torch.tensor(ints, dtype=torch.int64)
        self._floats[first:last] = torch.tensor(floats, dtype=torch.float32)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy some slots to others."""
        self._ints[targets] = self._ints[sources]
        self._floats[targets] = self._floats[sources]

    def feed(self, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Newest token, its place and its position, of the first `num` slots, int64 [num] each."""
        return self._ints[:num, _TOKEN], self._ints[:num, _PLACE], self._ints[:num, _POSITION]

    def row_sampling(self, num: int, features: SamplingFeatures) -> RowSampling:
        """Sampling parameters of the next unit of the first `num` slots."""
        ints, floats = self._ints[:num], self._floats[:num]
        return RowSampling(
            keys_R=ints[:, _KEY],
            units_R=ints[:, _UNIT],
            temperature_R=floats[:, _TEMPERATURE] if SamplingFeatures.SCALED in features else None,
            greedy_R=ints[:, _GREEDY].bool() if SamplingFeatures.GREEDY in features else None,
            top_k_R=ints[:, _TOP_K] if SamplingFeatures.RESTRICTED in features else None,
            top_p_R=floats[:, _TOP_P] if SamplingFeatures.RESTRICTED in features else None,
        )

    def advance(self, tokens_R: torch.Tensor, is_real_R: torch.Tensor | None = None) -> None:
        """Take in what the first R slots drew; those that are not real stay as they are."""
        rows = self._ints[: tokens_R.shape[0]]
        rows[:, _TOKEN] = tokens_R if is_real_R is None else torch.where(is_real_R, tokens_R, rows[:, _TOKEN])
        rows[:, _PLACE : _UNIT + 1] += 1 if is_real_R is None else is_real_R[:, None]


def draw_next(
    logits_RV: torch.Tensor, numbers: SlotNumbers, features: SamplingFeatures, is_real_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens drawn for the first R slots, which take them in, and log-probs: float64 [2, R] holds both as they are."""
    tokens_R, logprobs_R = draw(logits_RV, numbers.row_sampling(len(logits_RV), features))
    numbers.advance(tokens_R, is_real_R)
    return torch.stack((tokens_R.double(), logprobs_R.double()))
