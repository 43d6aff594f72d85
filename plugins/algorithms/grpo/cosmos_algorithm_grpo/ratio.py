"""Ratios of probabilities under two policies, over whole sequences.

Tensors' own methods are used throughout, so that importing an algorithm imports no torch.

Shape legend: N decisions of a micro-batch, S its sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_core.protocols.objectives import log_ratio

if TYPE_CHECKING:
    import torch


def mean_of_sequence(values_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The mean of each decision's sequence, at each of its decisions [N].

    Args:
        values_N: One value for each decision.
        sequence_N: int64 in [0, S), the sequence of each decision; some may have none.
        num_sequences: S.
    """
    zeros_S = values_N.new_zeros(num_sequences)
    lengths_S = zeros_S.index_add(0, sequence_N, values_N.new_ones(len(values_N)))
    means_S = zeros_S.index_add(0, sequence_N, values_N) / lengths_S.clamp(min=1.0)
    return means_S.index_select(0, sequence_N)


def sequence_log_ratio(
    logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """The mean over a sequence of log(new / old), at each of its decisions; the gradient is of the decision alone.

    The mean itself spreads a gradient of 1 / length over the sequence from each of its decisions, which comes to the
    same once prices are added up, as all decisions of a sequence weigh alike and have one advantage. So prices stay
    independent of one another, and advantages may differ within a sequence.

    Args:
        logprobs_N: With gradient.
        old_logprobs_N: Detached.
        sequence_N: int64 in [0, S), the sequence of each decision.
        num_sequences: S.

    Source: 2507.18071, equations 7 (the ratio) and 14 (its token form). Deviation: a decision counts for at most 20
    in the mean, either way.
    """
    mean_N = mean_of_sequence(log_ratio(logprobs_N.detach(), old_logprobs_N), sequence_N, num_sequences)
    return mean_N + (logprobs_N - logprobs_N.detach())
