"""Decoupled PPO: the clip is about the weights at the start of the step, staleness is a weight outside of it.

    loss = mean over all tokens of -w min(u A, clip(u, 1 - ε, 1 + ε) A)
    u = π / π_start, w = the detached min(π_start / μ, cap)

Source: the decoupled objective of 2110.00641 and 2505.24298. Deviations: w has a cap, and A is GRPO's. A step of this
trainer is one update, so that u is 1 where prices are taken: the clip never binds, and the gradient is that of
w A log π.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo import CAPABILITIES, ClippedOptions, clipped, defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(kw_only=True, field_transformer=defaults(old_logprobs="recompute", importance_cap=5.0))
class DecoupledPpoOptions(ClippedOptions):
    """Options of `decoupled-ppo`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide decoupled PPO."""
    return Provider(create=clipped, options=DecoupledPpoOptions, capabilities=CAPABILITIES)
