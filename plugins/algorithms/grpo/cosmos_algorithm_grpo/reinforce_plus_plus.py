"""REINFORCE++: advantages normalised over the whole batch.

    A_t = R - β Σ_{i ≥ t} log(π_old / π_ref), then (A_t - mean of batch) / (std of batch + eps) over all decisions
    loss = mean over all tokens of -min(r A_t, clip(r, 1 - ε, 1 + ε) A_t)

One sample of each prompt is enough. With `baseline = "group-mean"` it is REINFORCE++-baseline.

Source: 2501.03262, equations 8 to 10. Deviations: as in `grpo`.
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
    field_transformer=defaults(baseline="none", scale="batch", kl_place="reward", kl_estimator="k1"),
)
class ReinforcePlusPlusOptions(ClippedOptions):
    """Options of `reinforce-plus-plus`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide REINFORCE++."""
    capabilities = attrs.evolve(CAPABILITIES, min_group_size=1)
    return Provider(create=clipped, options=ReinforcePlusPlusOptions, capabilities=capabilities)
