"""GSPO: group sequence policy optimisation.

    s = exp(mean over tokens of log(π / π_old)), A as in GRPO
    loss = mean over sequences of -min(s A, clip(s, 1 - ε_low, 1 + ε_high) A)

Source: 2507.18071, equations 5 to 7, in the token form of equations 13 and 14, whose price and gradient are the same;
the bounds are those of section 5.1. Deviations: as in `grpo`.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo.making import clipped
from cosmos_algorithm_grpo.objective import CAPABILITIES
from cosmos_algorithm_grpo.options import ClippedOptions
from cosmos_algorithm_grpo.preset import defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(
    kw_only=True,
    field_transformer=defaults(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence-mean-token-mean"),
)
class GspoOptions(ClippedOptions):
    """Options of `gspo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide GSPO."""
    return Provider(create=clipped, options=GspoOptions, capabilities=CAPABILITIES)
