"""GRPO.

    A = (R - mean of group) / (std of group + eps)
    loss = mean over sequences of the mean over tokens of -min(r A, clip(r, 1 - ε, 1 + ε) A) + β (e^d - d - 1)
    r = π / π_old, d = log(π_ref / π)

Source: 2402.03300, equations 3 and 4 with the outcome-supervision advantage of section 4.1.2.
Deviations: β is 0 unless set; the clip range has two bounds (equal by default); each decision's ratio is taken against
the weights that generated it, so that stale samples are corrected.
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
    field_transformer=defaults(aggregation="sequence-mean-token-mean"),
)
class GrpoOptions(ClippedOptions):
    """Options of `grpo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide GRPO."""
    return Provider(create=clipped, options=GrpoOptions, capabilities=CAPABILITIES)
