"""An objective put together from its parts: advantages, a ratio, a surrogate, corrections, a divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from cosmos_algorithm_grpo.advantage import Rewards, all_equal, centred, over_group_deviation, scored, whitened
from cosmos_algorithm_grpo.combination import check_combination
from cosmos_algorithm_grpo.correction import kept_sequences, masked_weight, truncated_weight
from cosmos_algorithm_grpo.kl import kl_estimate
from cosmos_algorithm_grpo.options import PolicyOptions
from cosmos_algorithm_grpo.ratio import sequence_log_ratio
from cosmos_algorithm_grpo.surrogate import Surrogate
from cosmos_core.protocols import Aggregation, AlgorithmCapabilities, AlgorithmContext, Decisions, Loss, PlainAlgorithm
from cosmos_core.protocols.objectives import log_ratio
from cosmos_core.types import Group, Sample

if TYPE_CHECKING:
    import torch

Shaping: TypeAlias = Callable[[Sample], float]
"""What is added to the reward of a scored sample."""

CAPABILITIES: Final = AlgorithmCapabilities(
    source="rollouts",
    payload_kinds=frozenset({"tokens"}),
    min_group_size=2,
    logprob_semantics=frozenset({"processed"}),
)


class Objective(PlainAlgorithm):
    """A policy-gradient objective.

    Args:
        options: Which part stands in each place.
        context: What the recipe says.
        surrogate: The policy term of a decision.
        shaping: Changes rewards before anything is computed of them.

    Raises:
        ConfigError: The options make no sense together, or in this recipe.
    """

    def __init__(
        self,
        options: PolicyOptions,
        context: AlgorithmContext,
        *,
        surrogate: Surrogate,
        shaping: Shaping = lambda _: 0.0,
    ) -> None:
        check_combination(options, context)
        self.aggregation = Aggregation(options.aggregation)
        self.constant_length = options.constant_length or context.max_units
        self.old_logprobs = options.old_logprobs
        # Without a divergence every term is a multiple of the advantage, which may differ from turn to turn.
        self.skips_zero_advantage = options.kl_weight == 0.0 and options.credit == "sample"
        self.consults = {"reference": None} if options.kl_weight > 0.0 else {}
        self._options: Final = options
        self._group_size: Final = context.group_size
        self._surrogate: Final = surrogate
        self._shaping: Final = shaping

    def admit(self, group: Group) -> str | None:
        """Drop a group with a reward that is no finite number, and, if the option says so, one of equal rewards."""
        reason, rewards = super().admit(group), rewards_of(group)
        if reason is None and self._options.dynamic_sampling and len(scored(rewards)) > 1 and all_equal(rewards):
            return "equal rewards"
        return reason

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards, shaped, above the baseline and on the scale of the options."""
        values = [self._advantages(group) for group in groups]
        if self._options.scale != "batch":
            return values
        num_units = [[sample.num_units for sample in group.samples] for group in groups]
        return whitened(values, num_units, eps=self._options.advantage_eps)

    def loss(self, decisions: Decisions) -> Loss:
        """Price decisions by the surrogate, weigh those that are off-policy, and add the divergence."""
        assert decisions.old_logprobs_N is not None
        priced = self._surrogate(
            logprobs_N=decisions.logprobs_N,
            log_ratio_N=self._log_ratio(decisions, decisions.old_logprobs_N),
            advantages_N=decisions.advantages_N,
        )
        loss_N, metrics = priced.loss_N, {**priced.metrics}
        for factor_N, told in self._factors(decisions, decisions.old_logprobs_N):
            loss_N = factor_N * loss_N
            metrics.update(told)
        if self._options.kl_weight > 0.0 and self._options.kl_place == "loss":
            reference_N = decisions.frozen["reference"].logprobs_N
            kl_N = kl_estimate(decisions.logprobs_N, reference_N, self._options.kl_estimator)
            loss_N = loss_N + self._options.kl_weight * kl_N
            metrics["reference_kl"] = kl_N.detach()
        return Loss(loss_N=loss_N, metrics=metrics)

    def _factors(
        self, decisions: Decisions, old_logprobs_N: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Detached factors of the prices of off-policy decisions, each with its metrics."""
        floor, cap = self._options.importance_floor, self._options.importance_cap
        behaviour_N = decisions.behaviour_logprobs_N
        if cap is not None and floor is None:
            weight_N = truncated_weight(old_logprobs_N=old_logprobs_N, behaviour_logprobs_N=behaviour_N, cap=cap)
            yield weight_N, {"importance_weight": weight_N}
        if cap is not None and floor is not None:
            weight_N = masked_weight(
                old_logprobs_N=old_logprobs_N, behaviour_logprobs_N=behaviour_N, floor=floor, cap=cap
            )
            yield weight_N, {"importance_weight": weight_N, "masked_tokens": (weight_N == 0).to(weight_N.dtype)}
        if self._options.sequence_limit is not None:
            kept_N = kept_sequences(
                logprobs_N=decisions.logprobs_N,
                behaviour_logprobs_N=behaviour_N,
                advantages_N=decisions.advantages_N,
                sequence_N=decisions.sequence_N,
                num_sequences=decisions.num_sequences,
                limit=self._options.sequence_limit,
            )
            yield kept_N, {"sequence_masked_tokens": 1.0 - kept_N}

    def _advantages(self, group: Group) -> list[float | None]:
        """The advantage of each sample, as far as its group alone decides it."""
        return self._compared(self._shaped(group))

    def _shaped(self, group: Group) -> list[float | None]:
        """The reward of each sample, shaped."""
        return [
            None if reward is None else reward + self._shaping(sample)
            for reward, sample in zip(rewards_of(group), group.samples, strict=True)
        ]

    def _compared(self, rewards: Rewards) -> list[float | None]:
        """What samples of one group are rewarded with, above the baseline, and on the group's scale if that is it."""
        values = centred(rewards, self._options.baseline)
        if self._options.scale == "group-std":
            return over_group_deviation(values, rewards, eps=self._options.advantage_eps)
        return values

    def _log_ratio(self, decisions: Decisions, old_logprobs_N: torch.Tensor) -> torch.Tensor:
        if self._options.ratio == "token":
            return log_ratio(decisions.logprobs_N, old_logprobs_N)
        return sequence_log_ratio(decisions.logprobs_N, old_logprobs_N, decisions.sequence_N, decisions.num_sequences)


def rewards_of(group: Group) -> list[float | None]:
    """The reward of each sample, None where it has none that may be used."""
    return [sample.reward if sample.is_scored else None for sample in group.samples]
