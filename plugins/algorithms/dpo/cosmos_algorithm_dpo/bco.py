"""The entry point `bco`: binary classifier optimisation."""

from __future__ import annotations

import attrs
from attrs import validators as check

from cosmos_algorithm_dpo.dpo import CAPABILITIES
from cosmos_algorithm_dpo.preference import Margin, PreferenceObjective, Slope
from cosmos_algorithm_dpo.sigmoid import log_sigmoid, sigmoid
from cosmos_core.config import option
from cosmos_core.protocols import Algorithm, AlgorithmContext, Provider, hookimpl


@attrs.frozen(kw_only=True)
class BcoOptions:
    """Options of `bco`."""

    beta: float = option(0.1, help="Strength of the pull to the reference.", validator=check.gt(0.0), dynamic=True)


def make(options: BcoOptions, context: AlgorithmContext) -> PreferenceObjective:  # noqa: ARG001 - the kind's signature
    """L = -log sigmoid(β chosen - δ) - log sigmoid(δ - β rejected), δ = β · mean of all log-ratios, a constant.

    Source: 2404.04656, equation 9. Deviation: δ is the mean of the step's whole batch, not a moving average, so that a
    step depends on nothing but its batch and weights.
    """

    def shape(margin: Margin) -> Slope:
        beta, shift = options.beta, options.beta * margin.mean
        chosen, rejected = beta * margin.chosen - shift, shift - beta * margin.rejected
        return Slope(
            loss=-log_sigmoid(chosen) - log_sigmoid(rejected),
            chosen=-beta * sigmoid(-chosen),
            rejected=beta * sigmoid(-rejected),
        )

    return PreferenceObjective(shape, options.beta)


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide binary classifier optimisation."""
    return Provider(create=make, options=BcoOptions, capabilities=CAPABILITIES)
