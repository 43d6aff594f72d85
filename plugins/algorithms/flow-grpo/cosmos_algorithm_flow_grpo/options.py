"""Options of `flow-grpo`."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option


@attrs.frozen(kw_only=True)
class FlowGrpoOptions:
    """Options of `flow-grpo`."""

    clip: float = option(
        1e-4,
        help="The ratio counts within 1 ± this. It is small since a log-prob is a mean over the latent's dimensions; "
        "1e-3 is usual for Wan.",
        validator=check.and_(check.gt(0.0), check.le(1.0)),
        dynamic=True,
    )
    spread: Literal["group", "batch"] = option(
        "group",
        help="Whose standard deviation advantages are divided by: of their prompt's rewards, or of the whole batch's.",
    )
    advantage_eps: float = option(
        1e-4, help="Added to the standard deviation that advantages are divided by.", validator=check.ge(0.0)
    )
    advantage_limit: float = option(5.0, help="Advantages count within ± this.", validator=check.gt(0.0), dynamic=True)
    aggregation: Literal["token-mean", "sequence-mean-token-mean"] = option(
        "sequence-mean-token-mean",
        help="How denoising steps are averaged: each alike, or each sample alike; the same where all samples have as "
        "many.",
    )
    old_logprobs: Literal["behaviour", "recompute"] = option(
        "behaviour",
        help="What the ratio compares with: `behaviour`, the engine's log-probs, corrects for stale samples; "
        "`recompute`, the trainer's at the start of the step, is for engines of another precision, in `sync` mode.",
    )
    kl_weight: float = option(
        0.0,
        help="Weight of the divergence from a frozen reference, in closed form (0.004 to 0.04 is usual); above 0, the "
        "recipe needs [reference].",
        validator=check.ge(0.0),
    )
