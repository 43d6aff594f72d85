"""The entry point `dpo`: direct preference optimisation."""

from __future__ import annotations

from typing import Final

import attrs
from attrs import validators as check

from cosmos_algorithm_dpo.preference import Margin, PreferenceObjective, Slope
from cosmos_algorithm_dpo.sigmoid import log_sigmoid, sigmoid
from cosmos_core.config import option
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext, Provider, hookimpl

CAPABILITIES: Final = AlgorithmCapabilities(
    source="preferences",
    payload_kinds=frozenset({"tokens"}),
    logprob_semantics=frozenset({"processed", "raw"}),
)
"""Those of every objective over pairs."""


@attrs.frozen(kw_only=True)
class DpoOptions:
    """Options of `dpo`."""

    beta: float = option(0.1, help="Strength of the pull to the reference.", validator=check.gt(0.0), dynamic=True)
    label_smoothing: float = option(
        0.0,
        help="Share of the pairs whose preference is taken to be wrong.",
        validator=check.and_(check.ge(0.0), check.lt(0.5)),
        dynamic=True,
    )


def make(options: DpoOptions, context: AlgorithmContext) -> PreferenceObjective:  # noqa: ARG001 - the kind's signature
    """L = -(1 - s) log sigmoid(h) - s log sigmoid(-h), h = β (chosen - rejected).

    Source: 2305.18290, equation 7; with label smoothing s, https://ericmitchell.ai/cdpo.pdf, equation 3.
    """

    def shape(margin: Margin) -> Slope:
        h, smoothing = options.beta * (margin.chosen - margin.rejected), options.label_smoothing
        derivative = options.beta * (smoothing * sigmoid(h) - (1.0 - smoothing) * sigmoid(-h))
        loss = -(1.0 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)
        return Slope(loss=loss, chosen=derivative, rejected=-derivative)

    return PreferenceObjective(shape, options.beta)


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide direct preference optimisation."""
    return Provider(create=make, options=DpoOptions, capabilities=CAPABILITIES)
