"""The divergence from the teacher's distribution, at each place of the policy's own completions."""

from __future__ import annotations

from cosmos_algorithm_distill.objective import Distillation
from cosmos_algorithm_distill.options import DistillOptions
from cosmos_core.protocols import Decisions, Loss
from cosmos_core.protocols.frozen import Divergence


class ExactDistillation(Distillation):
    """L_t = D(teacher, policy) at the places that the policy came to; no gradient through how it came there.

    Source: 2306.13649 (GKD), equation 2 with λ = 1, and equation 1 for the divergence.
    """

    def __init__(self, options: DistillOptions) -> None:
        self.consults = {"teacher": Divergence(kind=options.divergence, beta=options.beta, top=options.top)}

    def loss(self, decisions: Decisions) -> Loss:
        """The divergence of each decision."""
        output = decisions.frozen["teacher"]
        assert output.divergence_N is not None
        distance_N = output.logprobs_N - decisions.logprobs_N.detach()
        return Loss(
            loss_N=output.divergence_N,
            metrics={"teacher_divergence": output.divergence_N.detach(), "teacher_kl": -distance_N},
        )
