"""IcePop: tokens that trainer and engine see too differently do not count.

    loss = mean over all tokens of -w min(r A, clip(r, 1 - ε, 1 + ε) A)
    w = the detached π_start / μ where it is within [floor, cap], else 0

Source: 2510.18855; 2512.16144, equation 1. The bounds are theirs. Deviations: A is GRPO's, and the mask is of the ratio
at the step's start, beside the clip.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo import CAPABILITIES, ClippedOptions, clipped, defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(
    kw_only=True, field_transformer=defaults(old_logprobs="recompute", importance_floor=0.5, importance_cap=5.0)
)
class IcepopOptions(ClippedOptions):
    """Options of `icepop`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide IcePop."""
    return Provider(create=clipped, options=IcepopOptions, capabilities=CAPABILITIES)
