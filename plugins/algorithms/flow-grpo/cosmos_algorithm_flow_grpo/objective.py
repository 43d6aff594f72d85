"""FlowGRPO's prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cosmos_algorithm_flow_grpo.options import FlowGrpoOptions
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions, Loss, PlainAlgorithm
from cosmos_core.protocols.frozen import Divergence
from cosmos_core.protocols.objectives import (
    add_divergence,
    clipped_surrogate,
    limited,
    log_ratio,
    refuse_recomputed,
    relative_rewards,
)
from cosmos_core.types import Group


class FlowGrpo(PlainAlgorithm):
    """GRPO whose decisions are denoising steps.

        A = (R - mean of group) / (std of group + eps), within ± its limit
        loss = mean over samples of the mean over their trained steps of -min(r A, clip(r, 1 - ε, 1 + ε) A) + β KL

    r is the probability of the step's outcome now over that when it was sampled, both as means over the latent's
    dimensions; KL is that of the two Gaussians of a step, which is ‖μ - μ_ref‖² / (2 std²), as such a mean too.

    Source: 2505.05470, section 4, and 2402.03300, equation 3. Deviations: log-probs and KL are means over dimensions
    instead of sums, as in the authors' code, and advantages are limited, as there; log r is limited to ±20; β is 0
    unless set; sample standard deviation.

    Raises:
        ConfigError: The options do not fit the recipe.
    """

    def __init__(self, options: FlowGrpoOptions, context: AlgorithmContext) -> None:
        uncorrected = refuse_recomputed(context) if options.old_logprobs == "recompute" else None
        if uncorrected is not None:
            raise ConfigError(f"algorithm.options.{uncorrected}")
        self.aggregation = Aggregation(options.aggregation)
        self.old_logprobs = options.old_logprobs
        # Without a divergence every term is a multiple of the advantage.
        self.skips_zero_advantage = options.kl_weight == 0.0
        self.consults = {"reference": Divergence(kind="reverse-kl")} if options.kl_weight > 0.0 else {}
        self._options: Final = options

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards relative to their prompt's, within the limit."""
        relative = relative_rewards(groups, eps=self._options.advantage_eps, spread=self._options.spread)
        return limited(relative, self._options.advantage_limit)

    def loss(self, decisions: Decisions) -> Loss:
        """The clipped surrogate, and the divergence if it counts."""
        assert decisions.old_logprobs_N is not None
        clip = self._options.clip
        log_ratio_N = log_ratio(decisions.logprobs_N, decisions.old_logprobs_N)
        priced = clipped_surrogate(log_ratio_N, decisions.advantages_N, low=clip, high=clip)
        return add_divergence(priced, decisions, self._options.kl_weight)
