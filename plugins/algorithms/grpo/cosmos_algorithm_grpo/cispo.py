"""CISPO: clipped importance-sampling weights instead of clipped updates.

    loss = mean over all tokens of -w A log π, w = the detached clip(π / π_old, 1 - ε_low, 1 + ε_high), A as in GRPO

Source: 2506.13585, equations 4 and 5. As in the paper there is no lower bound; `weight_cap` is 1 + ε_high, and
its default is ours. Deviations: as in `grpo`.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo.making import weighted
from cosmos_algorithm_grpo.objective import CAPABILITIES
from cosmos_algorithm_grpo.options import WeightedOptions
from cosmos_algorithm_grpo.preset import defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(
    kw_only=True,
    field_transformer=defaults(weight_cap=5.0),
)
class CispoOptions(WeightedOptions):
    """Options of `cispo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide CISPO."""
    return Provider(create=weighted, options=CispoOptions, capabilities=CAPABILITIES)
