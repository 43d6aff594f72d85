"""GRPO.

Source: 2402.03300, equation 3 with the outcome-supervision advantage of section 4.1.2.
Deviations: no KL term (beta = 0, as its successors do); the clip range has two bounds (equal by default); each
decision's ratio is taken against the weights that generated it, so that stale samples are corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.advantage import normalised
from cosmos_algorithm_grpo.objective import CAPABILITIES, ClippedObjective, ClippedOptions, rewards_of
from cosmos_core.config import option
from cosmos_core.protocols import Aggregation, Algorithm, AlgorithmContext, Provider, hookimpl
from cosmos_core.types import Group


@attrs.frozen(kw_only=True)
class GrpoOptions(ClippedOptions):
    """Options of `grpo`."""

    aggregation: Literal["sequence-mean-token-mean", "token-mean"] = option(
        "sequence-mean-token-mean",
        help="How decisions are averaged: each sequence alike, as in the paper, or each token alike.",
    )
    advantage_eps: float = option(1e-6, help="Added to the group's standard deviation.", validator=check.ge(0.0))


class Grpo(ClippedObjective):
    """Group-relative advantages over the group's standard deviation."""

    def __init__(self, options: GrpoOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self._aggregation = Aggregation(options.aggregation)
        self._eps = options.advantage_eps

    @property
    def aggregation(self) -> Aggregation:
        """As the option says."""
        return self._aggregation

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """(R - mean) / (std + eps) within each group."""
        return [normalised(rewards_of(group), eps=self._eps) for group in groups]


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide GRPO."""
    return Provider(create=Grpo, options=GrpoOptions, capabilities=CAPABILITIES)
