"""The reverse divergence from the teacher, estimated from the tokens that were generated."""

from __future__ import annotations

from collections.abc import Mapping

from cosmos_algorithm_distill.objective import Distillation
from cosmos_algorithm_distill.options import DistillOptions
from cosmos_core.protocols import Decisions, Loss
from cosmos_core.protocols.frozen import FrozenRole


class SampledDistillation(Distillation):
    """Policy gradient with the advantage log q(y_t) - log π(y_t) of each token, q being the teacher.

    The expected gradient is that of KL(π || q) at each place, since E[∇ log π] = 0. A token that older weights μ
    generated counts min(π / μ, cap) times, detached.

    Source: 2306.13649, equation 1 with the reverse divergence; the estimator is that of 2306.08543 (MiniLLM), section
    2.2, for one step. The weight is that of truncated importance sampling.
    """

    consults: Mapping[FrozenRole, None] = {"teacher": None}

    def __init__(self, options: DistillOptions) -> None:
        self._cap = options.weight_cap

    def loss(self, decisions: Decisions) -> Loss:
        """Minus the advantage times the weight times the log-prob."""
        now_N = decisions.logprobs_N.detach()
        distance_N = decisions.frozen["teacher"].logprobs_N - now_N
        weight_N = (now_N - decisions.behaviour_logprobs_N).exp().clamp(max=self._cap)
        return Loss(
            loss_N=-distance_N * weight_N * decisions.logprobs_N,
            metrics={"teacher_kl": -distance_N, "weight": weight_N},
        )
