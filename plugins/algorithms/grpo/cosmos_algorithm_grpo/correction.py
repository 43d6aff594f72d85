"""Weights of decisions that the trainer and the engine see differently: numerics, or weights of another step.

Shape legend: N decisions of a micro-batch, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_algorithm_grpo.ratio import mean_of_sequence
from cosmos_core.protocols.objectives import log_ratio

if TYPE_CHECKING:
    import torch


def truncated_weight(*, old_logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(old logprob - behaviour logprob), cap), detached: a weight, never a way for gradients.

    Source: the decoupled objective of 2110.00641 and 2505.24298, in which the behaviour ratio stays outside of the
    clip. Deviation: the cap, as in truncated importance sampling.
    """
    return log_ratio(old_logprobs_N, behaviour_logprobs_N).exp().clamp(max=cap).detach()


def masked_weight(
    *, old_logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, floor: float, cap: float
) -> torch.Tensor:
    """exp(old logprob - behaviour logprob) where it lies within [floor, cap], else 0; detached.

    A ratio that is NaN stays so, for the step's check of what is finite.

    Source: IcePop, 2510.18855; 2512.16144, equation 1.
    """
    ratio_N = log_ratio(old_logprobs_N, behaviour_logprobs_N).exp().detach()
    return ratio_N.masked_fill((ratio_N < floor) | (ratio_N > cap), 0.0)


def kept_sequences(
    *,
    logprobs_N: torch.Tensor,
    behaviour_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    limit: float,
) -> torch.Tensor:
    """1 for the decisions of sequences that count, 0 for those of a negative advantage that are too far off-policy.

    A sequence is too far if the mean over its decisions of behaviour logprob - logprob exceeds `limit`.

    Args:
        logprobs_N: Under the current weights.
        behaviour_logprobs_N: The engine's.
        advantages_N: Of each decision's sequence.
        sequence_N: int64 in [0, S), the sequence of each decision.
        num_sequences: S.
        limit: Largest mean.

    Source: off-policy sequence masking of DeepSeek-V3.2, 2512.02556. Deviation: a decision counts for at most 20 in
    the mean, either way.
    """
    distance_N = log_ratio(behaviour_logprobs_N, logprobs_N.detach())
    is_far_N = mean_of_sequence(distance_N, sequence_N, num_sequences) > limit
    return (~(is_far_N & (advantages_N < 0))).to(distance_N.dtype)
