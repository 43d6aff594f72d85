"""Estimators of KL(policy || reference) from the decisions that were taken.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from cosmos_core.protocols.objectives import log_ratio

if TYPE_CHECKING:
    import torch

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """The divergence at each decision, d = reference logprob - logprob.

    `k1` is -d, `k2` is d² / 2, `k3` is e^d - 1 - d. On-policy, k1 and k3 have the divergence as their mean. The mean
    gradient of k2 is that of the divergence, that of k3 is of KL(reference || policy), and that of k1 is 0.

    Args:
        logprobs_N: Of the policy.
        reference_logprobs_N: Of the reference, detached.
        estimator: Which.

    Source: http://joschu.net/blog/kl-approx.html; k3 2402.03300, equation 4. Deviation: d is limited to ±20.
    """
    distance_N = log_ratio(reference_logprobs_N, logprobs_N)
    match estimator:
        case "k1":
            return -distance_N
        case "k2":
            return distance_N.square() / 2.0
        case "k3":
            return distance_N.exp() - 1.0 - distance_N
