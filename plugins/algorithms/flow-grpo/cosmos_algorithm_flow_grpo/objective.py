"""FlowGRPO's prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cosmos_algorithm_flow_grpo.options import FlowGrpoOptions
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import (
    Aggregation,
    AlgorithmContext,
    Decisions,
    Divergence,
    FrozenRole,
    Loss,
    OldLogprobs,
    clipped_surrogate,
    refuse_nonfinite,
    relative_rewards,
)
from cosmos_core.types import Group


class FlowGrpo:
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
        if options.old_logprobs == "recompute" and context.max_staleness > 0:
            raise ConfigError(
                "algorithm.options.old_logprobs = 'recompute': the ratio would compare the weights of one step with "
                f"themselves, and samples up to {context.max_staleness} steps old would go uncorrected; set "
                "old_logprobs = 'behaviour', or sync.mode = 'sync'"
            )
        if options.old_logprobs == "recompute" and context.generates_average:
            raise ConfigError(
                "algorithm.options.old_logprobs = 'recompute': the ratio would compare the trained weights with "
                "themselves, and samples come from their average (policy.average.publish); set old_logprobs = "
                "'behaviour', or policy.average.publish = false"
            )
        self._options: Final = options

    @property
    def aggregation(self) -> Aggregation:
        """As the option says."""
        return Aggregation(self._options.aggregation)

    @property
    def constant_length(self) -> int:
        """Unused by either aggregation."""
        return 1

    @property
    def old_logprobs(self) -> OldLogprobs:
        """As the option says."""
        return self._options.old_logprobs

    @property
    def needs_entropy(self) -> bool:
        """A step's noise is given: its entropy is no function of the weights."""
        return False

    @property
    def skips_zero_advantage(self) -> bool:
        """Without a divergence every term is a multiple of the advantage."""
        return self._options.kl_weight == 0.0

    @property
    def consults(self) -> Mapping[FrozenRole, Divergence]:
        """The divergence from the reference, if it counts."""
        return {"reference": Divergence(kind="reverse-kl")} if self._options.kl_weight > 0.0 else {}

    def admit(self, group: Group) -> str | None:
        """Drop a group with a reward that is no finite number."""
        return refuse_nonfinite(group)

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards relative to their prompt's, within the limit."""
        limit = self._options.advantage_limit
        relative = relative_rewards(groups, eps=self._options.advantage_eps, spread=self._options.spread)
        return [[None if each is None else min(max(each, -limit), limit) for each in values] for values in relative]

    def loss(self, decisions: Decisions) -> Loss:
        """The clipped surrogate, and the divergence if it counts."""
        priced = clipped_surrogate(decisions, self._options.clip)
        if self._options.kl_weight == 0.0:
            return priced
        kl_N = decisions.frozen["reference"].divergence_N
        assert kl_N is not None
        loss_N = priced.loss_N + self._options.kl_weight * kl_N
        return Loss(loss_N=loss_N, metrics={**priced.metrics, "reference_kl": kl_N.detach()})
