"""TIS: truncated importance sampling between trainer and engine.

    loss = mean over all tokens of -w min(r A, clip(r, 1 - ε, 1 + ε) A), w = the detached min(π_start / μ, C)

At equal weights the ratio of π_start, which the trainer computes, to μ, which the engine recorded, is their mismatch
alone; of a stale sample it is its staleness, too.

Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
(https://fengyao.notion.site/off-policy-rl); C is 2 there, too. Deviation: A is GRPO's.
"""

from __future__ import annotations

import attrs

from cosmos_algorithm_grpo import CAPABILITIES, ClippedOptions, clipped, defaults
from cosmos_core.protocols import Algorithm, Provider, hookimpl


@attrs.frozen(kw_only=True, field_transformer=defaults(old_logprobs="recompute", importance_cap=2.0))
class TisOptions(ClippedOptions):
    """Options of `tis`."""


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide truncated importance sampling."""
    return Provider(create=clipped, options=TisOptions, capabilities=CAPABILITIES)
