"""The entry point `ipo`: identity preference optimisation."""

from __future__ import annotations

import attrs
from attrs import validators as check

from cosmos_algorithm_dpo.dpo import CAPABILITIES
from cosmos_algorithm_dpo.preference import Margin, PreferenceObjective, Slope
from cosmos_core.config import option
from cosmos_core.protocols import Algorithm, AlgorithmContext, Provider, hookimpl


@attrs.frozen(kw_only=True)
class IpoOptions:
    """Options of `ipo`."""

    beta: float = option(
        0.1,
        help="Strength of the pull to the reference: the difference of log-ratios is drawn to 1 / (2 beta).",
        validator=check.gt(0.0),
        dynamic=True,
    )


def make(options: IpoOptions, context: AlgorithmContext) -> PreferenceObjective:  # noqa: ARG001 - the kind's signature
    """L = (chosen - rejected - 1 / (2 β))².

    Source: 2310.12036, equation 17 (τ there is β here). Log-ratios are sums over tokens, as there.
    """

    def shape(margin: Margin) -> Slope:
        distance = margin.chosen - margin.rejected - 0.5 / options.beta
        return Slope(loss=distance**2, chosen=2.0 * distance, rejected=-2.0 * distance)

    return PreferenceObjective(shape, options.beta)


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide identity preference optimisation."""
    return Provider(create=make, options=IpoOptions, capabilities=CAPABILITIES)
