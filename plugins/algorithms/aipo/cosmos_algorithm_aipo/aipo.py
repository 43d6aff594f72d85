"""AIPO: asynchronous importance-weighted policy optimisation.

    loss = mean over all tokens of -w A log π, w = the detached min(π / μ, cap)

μ is the policy that generated the token, as its engine recorded it; the cap, the paper's rho, is the only bound. It
costs no more forwards than a step without a correction.

Source: 2505.24034. Deviation: A is GRPO's; the default of the cap is ours.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo import CAPABILITIES, WeightedOptions, defaults, weighted
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(kw_only=True, field_transformer=defaults(weight_cap=4.0))
class AipoOptions(WeightedOptions):
    """Options of `aipo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide AIPO."""
    return Provider(create=weighted, options=AipoOptions, capabilities=CAPABILITIES)
