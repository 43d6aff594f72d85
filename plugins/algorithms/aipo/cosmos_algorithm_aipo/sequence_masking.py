"""Off-policy sequence masking: bad completions that the policy no longer makes do not count.

    loss = mean over all tokens of -M min(r A, clip(r, 1 - ε, 1 + ε) A)
    M = 0 if A < 0 and the mean over the sequence of log(μ / π) > δ, else 1

Source: 2512.02556, off-policy sequence masking; the default of δ (`sequence_limit`) is ours.
Deviations: A is GRPO's; there is no divergence unless asked for.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo import CAPABILITIES, ClippedOptions, clipped, defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(kw_only=True, field_transformer=defaults(sequence_limit=0.1))
class SequenceMaskingOptions(ClippedOptions):
    """Options of `sequence-masking`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide off-policy sequence masking."""
    return Provider(create=clipped, options=SequenceMaskingOptions, capabilities=CAPABILITIES)
