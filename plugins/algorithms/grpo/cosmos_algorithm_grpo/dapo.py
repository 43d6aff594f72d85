"""DAPO: decoupled clip and dynamic sampling policy optimisation.

Source: 2503.14476, equations 8 to 13: asymmetric clip range, token-level loss, groups without contrast refilled,
soft punishment of overlong completions.
Deviations: as in `grpo`; a group has no contrast when all its rewards are equal (for rewards of right and wrong
that is the paper's condition), judged before lengths are punished.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.advantage import all_equal, normalised, scored
from cosmos_algorithm_grpo.objective import CAPABILITIES, ClippedObjective, ClippedOptions, rewards_of
from cosmos_algorithm_grpo.overlong import length_reward
from cosmos_core.config import option
from cosmos_core.protocols import Aggregation, Algorithm, AlgorithmContext, Provider, hookimpl
from cosmos_core.types import Group, Sample


@attrs.frozen(kw_only=True)
class DapoOptions(ClippedOptions):
    """Options of `dapo`."""

    clip_high: float = option(0.28, help="The ratio counts up to 1 + clip_high.", validator=check.gt(0.0), dynamic=True)
    advantage_eps: float = option(1e-6, help="Added to the group's standard deviation.", validator=check.ge(0.0))
    dynamic_sampling: bool = option(
        True, help="Whether groups of equal rewards are dropped and refilled.", dynamic=True
    )
    overlong_share: float = option(
        0.2,
        help="Last part of `rollout.sampling.max_units` in which a completion loses reward; 0 punishes nothing.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
        dynamic=True,
    )
    overlong_penalty: float = option(
        1.0, help="Reward that a completion of the longest length loses.", validator=check.ge(0.0), dynamic=True
    )


class Dapo(ClippedObjective):
    """GRPO's advantages after length shaping, averaged over tokens, on groups that have contrast."""

    def __init__(self, options: DapoOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self._options = options
        self._max_units = context.max_units
        self._buffer_units = round(options.overlong_share * context.max_units)

    @property
    def aggregation(self) -> Aggregation:
        """Each token alike."""
        return Aggregation.TOKEN_MEAN

    def admit(self, group: Group) -> str | None:
        """Drop a group whose rewards are all equal."""
        rewards = rewards_of(group)
        if self._options.dynamic_sampling and len(scored(rewards)) > 1 and all_equal(rewards):
            return "equal rewards"
        return None

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """(R - mean) / (std + eps) within each group, R shaped by length."""
        return [
            normalised([self._shaped(sample) for sample in group.samples], eps=self._options.advantage_eps)
            for group in groups
        ]

    def _shaped(self, sample: Sample) -> float | None:
        if not sample.is_scored:
            return None
        assert sample.reward is not None
        shaping = length_reward(sample.num_units, max_units=self._max_units, buffer_units=self._buffer_units)
        return sample.reward + self._options.overlong_penalty * shaping


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide DAPO."""
    return Provider(create=Dapo, options=DapoOptions, capabilities=CAPABILITIES)
