"""Dr. GRPO: GRPO without its two biases.

    A = R - mean of group
    loss = mean over sequences of (1 / L) the sum over tokens of -min(r A, clip(r, 1 - ε, 1 + ε) A)

The advantage has no divisor (no bias towards questions of a certain difficulty), and the loss of a sequence is the sum
over its tokens over a constant (no bias by length).

Source: 2503.20783, section 3.2. Deviations: as in `grpo`; the constant L is the longest completion.
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
    field_transformer=defaults(scale="none", aggregation="sequence-mean-token-sum"),
)
class DrGrpoOptions(ClippedOptions):
    """Options of `dr-grpo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide Dr. GRPO."""
    return Provider(create=clipped, options=DrGrpoOptions, capabilities=CAPABILITIES)
