"""Options of `distill`."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option


@attrs.frozen(kw_only=True)
class DistillOptions:
    """Options of `distill`."""

    divergence: Literal["reverse-kl", "forward-kl", "jsd"] = option(
        "reverse-kl",
        help="From the teacher: KL(policy || teacher), KL(teacher || policy), or the generalised Jensen-Shannon one.",
    )
    beta: float = option(
        0.5,
        help="Of `jsd`: the teacher's share of the mixture; near 0 it is like forward-kl, near 1 like reverse-kl.",
        validator=check.and_(check.gt(0.0), check.lt(1.0)),
    )
    top: int | None = option(
        64,
        help="Tokens that are told apart at each place, the teacher's likeliest; all others count as one.",
        validator=check.optional(check.ge(1)),
    )
    estimate: Literal["exact", "sampled"] = option(
        "exact",
        help="Whether the divergence is summed over tokens, or taken from the generated one (reverse-kl only): then "
        "the teacher gives one number a token, and the gradient is noisier.",
    )
    weight_cap: float = option(
        2.0,
        help="Of `sampled`: most that a token of older weights counts, as its probability now over that then.",
        validator=check.gt(0.0),
    )
