"""Dr. GRPO: GRPO without its two biases.

Source: 2503.20783, section 3.2: the advantage has no divisor (no bias towards questions of a certain difficulty),
and the loss of a sequence is the sum over its tokens over a constant (no bias by length).
Deviations: as in `grpo`; the constant is the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.advantage import mean_only
from cosmos_algorithm_grpo.objective import CAPABILITIES, ClippedObjective, ClippedOptions, rewards_of
from cosmos_core.config import option
from cosmos_core.protocols import Aggregation, Algorithm, AlgorithmContext, Provider, hookimpl
from cosmos_core.types import Group


@attrs.frozen(kw_only=True)
class DrGrpoOptions(ClippedOptions):
    """Options of `dr-grpo`."""

    constant_length: int | None = option(
        None,
        help="Divisor of each sequence's sum of losses; `rollout.sampling.max_units` if absent.",
        validator=check.optional(check.ge(1)),
    )


class DrGrpo(ClippedObjective):
    """Mean-only advantages, token sums over a constant length."""

    def __init__(self, options: DrGrpoOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self._constant_length = options.constant_length or context.max_units

    @property
    def aggregation(self) -> Aggregation:
        """Mean over sequences of the sum over tokens."""
        return Aggregation.SEQUENCE_MEAN_TOKEN_SUM

    @property
    def constant_length(self) -> int:
        """What the sum over tokens is divided by."""
        return self._constant_length

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """R - mean within each group."""
        return [mean_only(rewards_of(group)) for group in groups]


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide Dr. GRPO."""
    return Provider(create=DrGrpo, options=DrGrpoOptions, capabilities=CAPABILITIES)
