"""Balance of experts: losses of a sequence, and a bias that no gradient moves.

A loss over a whole batch is no sum over its sequences, and would depend on how the batch was split into
micro-batches. These are taken within each sequence, and weighed as the sequence is in the algorithm's loss.

Shape legend: U units, S sequences, E experts, K experts of a unit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def sequence_balance(
    probabilities_UE: torch.Tensor,
    experts_UK: torch.Tensor,
    sequence_U: torch.Tensor,
    num_sequences: int,
    *,
    counts_per_choice: bool,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> torch.Tensor:
    """The imbalance of each sequence's units over the experts.

    Source: arXiv:2101.03961, equations 4 to 6, with each of a unit's K choices counted, as transformers does;
    arXiv:2412.19437, equations 17 to 20 (`counts_per_choice`), but for counting the experts that were used, where
    equation 18 counts those that would be without the bias.

    Args:
        probabilities_UE: float32, a unit's affinities; they carry the gradient.
        experts_UK: int64, the experts that were used.
        sequence_U: int64 in [0, S), the sequence of each unit.
        num_sequences: S.
        counts_per_choice: Whether an expert's load is divided by K.
        total: Sums over the processes that hold the other units of the same sequences.

    Returns:
        float32 [S]: E times the sum over experts of load and mean affinity. Where experts are equally busy it is K,
        or 1 with `counts_per_choice`; 0 for a sequence without units. With `total`, this process's part of it.
    """
    U, E = probabilities_UE.shape
    K = experts_UK.shape[1]
    load_SE = probabilities_UE.new_zeros(num_sequences, E)
    flat_index = (sequence_U[:, None] * E + experts_UK).flatten()
    load_SE.view(-1).index_add_(0, flat_index, probabilities_UE.new_ones(U * K))
    units_S = probabilities_UE.new_zeros(num_sequences).index_add_(0, sequence_U, probabilities_UE.new_ones(U))
    totals_SX = total(torch.cat([load_SE, units_S[:, None]], dim=1))
    load_SE, units_S = totals_SX[:, :E], totals_SX[:, E].clamp(min=1.0)
    affinity_SE = torch.zeros_like(load_SE).index_add(0, sequence_U, probabilities_UE)
    scale = E / K if counts_per_choice else E
    return scale * (load_SE * affinity_SE).sum(1) / units_S**2


def sequence_z(
    logits_UE: torch.Tensor,
    sequence_U: torch.Tensor,
    num_sequences: int,
    *,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> torch.Tensor:
    """Mean square of the logits' log-sum-exp over each sequence's units: large logits are rounded coarsely.

    Source: arXiv:2202.08906, equation 5, within each sequence.

    Args:
        logits_UE: Router logits.
        sequence_U: int64 in [0, S), the sequence of each unit.
        num_sequences: S.
        total: Sums over the processes that hold the other units of the same sequences.

    Returns:
        float32 [S]; with `total`, this process's part of it.
    """
    square_U = torch.logsumexp(logits_UE.float(), dim=-1).square()
    zeros_S = square_U.new_zeros(num_sequences)
    units_S = total(zeros_S.index_add(0, sequence_U, torch.ones_like(square_U))).clamp(min=1.0)
    return zeros_S.index_add(0, sequence_U, square_U) / units_S


def load_of(experts_UK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """float32 [E]: how often each expert was used."""
    return torch.bincount(experts_UK.flatten(), minlength=num_experts).float()


def move_bias(bias_E: torch.Tensor, load_E: torch.Tensor, rate: float) -> None:
    """Make experts with less than the mean load likelier, and those with more less likely, in place.

    Source: arXiv:2408.15664, algorithm 1; arXiv:2412.19437, section 2.1.2.

    Args:
        bias_E: float32, added to an expert's score where experts are chosen.
        load_E: Uses of each expert in the whole batch.
        rate: u of the paper.
    """
    bias_E += rate * (load_E.mean() - load_E).sign()


def imbalance(load_E: torch.Tensor) -> float:
    """Load of the busiest expert over the mean, less one (MaxVio); 0 where nothing was counted.

    Source: arXiv:2408.15664, equation 4.
    """
    mean = load_E.mean().item()
    return load_E.max().item() / mean - 1.0 if mean > 0 else 0.0
