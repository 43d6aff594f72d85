"""DDRL's prices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cosmos_algorithm_ddrl.options import DdrlOptions
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions, Loss, PlainAlgorithm
from cosmos_core.protocols.frozen import Divergence
from cosmos_core.protocols.objectives import add_divergence, clipped_surrogate, limited, log_ratio, relative_rewards
from cosmos_core.types import Group


class Ddrl(PlainAlgorithm):
    """Reward, and the data's own loss in place of a reference model.

        loss = mean over samples of the mean over their trained steps of -min(r A, clip(r, 1 - ε, 1 + ε) A) + β KL
             + δ · mean over demonstrations of the mean over their draws of ‖v - (e - x_0)‖² / dimensions

    A is the reward relative to its prompt's, λ(A) = -exp(-A) of it with `exponential`, within ± its limit; r and KL are
    those of a denoising step, as means over the latent's dimensions. The last term, up to weights of times, is the
    divergence KL(data || policy): unlike one from a reference it needs no second model, and is blind to no sample that
    data has.

    Source: 2512.04332, the objective max E[λ((R - Z) / β)] - KL(data || policy). Deviations: (R - Z) / β is the reward
    relative to its group; λ is the identity unless `exponential`; the policy term is clipped; times and noise of
    demonstrations are drawn by the model's options, not taken from the rollouts; β is 0 unless set, and its term is the
    closed form of a step's KL.
    """

    old_logprobs = "behaviour"

    def __init__(self, options: DdrlOptions, context: AlgorithmContext) -> None:  # noqa: ARG002 - the kind's signature
        self.aggregation = Aggregation(options.aggregation)
        # Without a divergence every term of a sample is a multiple of its advantage.
        self.skips_zero_advantage = options.kl_weight == 0.0
        self.consults = {"reference": Divergence(kind="reverse-kl")} if options.kl_weight > 0.0 else {}
        self.num_demonstrations = options.demonstrations
        self._options: Final = options

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards relative to their prompt's, transformed, within the limit."""
        relative = relative_rewards(groups, eps=self._options.advantage_eps)
        if self._options.exponential:
            relative = [[None if each is None else -math.exp(-each) for each in values] for values in relative]
        return limited(relative, self._options.advantage_limit)

    def loss(self, decisions: Decisions) -> Loss:
        """The clipped surrogate, and the divergence if it counts."""
        assert decisions.old_logprobs_N is not None
        clip = self._options.clip
        log_ratio_N = log_ratio(decisions.logprobs_N, decisions.old_logprobs_N)
        priced = clipped_surrogate(log_ratio_N, decisions.advantages_N, low=clip, high=clip)
        return add_divergence(priced, decisions, self._options.kl_weight)

    def imitation(self, decisions: Decisions) -> Loss:
        """The weighted diffusion loss of each draw: its log-prob is minus that loss."""
        return Loss(
            loss_N=-self._options.data_weight * decisions.logprobs_N,
            metrics={"data_loss": -decisions.logprobs_N.detach()},
        )
