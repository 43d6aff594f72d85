"""The entry point `sft`: cross entropy on the tokens of demonstrations, or flow matching of videos.

Tensors' own methods are used, so that importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from cosmos_core.config import option
from cosmos_core.protocols import (
    Aggregation,
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    Decisions,
    Loss,
    PlainAlgorithm,
    Provider,
    hookimpl,
)
from cosmos_core.types import Group


@attrs.frozen(kw_only=True)
class SftOptions:
    """Options of `sft`."""

    aggregation: Literal["token-mean", "sequence-mean-token-mean"] = option(
        "token-mean", help="How tokens are averaged: each token alike, or each demonstration alike."
    )


class Sft(PlainAlgorithm):
    """A decision of a demonstration costs minus its log-probability.

    Of a token that is cross entropy. The log-probability of a point at which a world model learns its velocity is minus
    the mean squared error there, so its price is the flow-matching loss (2210.02747, equation 23).
    """

    def __init__(self, options: SftOptions, context: AlgorithmContext) -> None:  # noqa: ARG002 - the kind's signature
        self.aggregation = Aggregation(options.aggregation)

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """None for every sample: demonstrations have no rewards."""
        return [[None] * len(group.samples) for group in groups]

    def loss(self, decisions: Decisions) -> Loss:
        """Minus the log-probability of each decision."""
        return Loss(loss_N=-decisions.logprobs_N)


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide supervised fine-tuning."""
    return Provider(
        create=Sft,
        options=SftOptions,
        capabilities=AlgorithmCapabilities(
            source="demonstrations",
            payload_kinds=frozenset({"tokens", "latents"}),
            logprob_semantics=frozenset({"processed", "raw"}),
        ),
    )
