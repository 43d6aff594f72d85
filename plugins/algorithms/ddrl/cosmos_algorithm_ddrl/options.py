"""Options of `ddrl`."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option


@attrs.frozen(kw_only=True)
class DdrlOptions:
    """Options of `ddrl`."""

    data_weight: float = option(
        0.01, help="Weight of the demonstrations' diffusion loss.", validator=check.gt(0.0), dynamic=True
    )
    demonstrations: int = option(
        1,
        help="Demonstrations for each prompt: the same one with other noise, where more than one.",
        validator=check.ge(1),
    )
    exponential: bool = option(
        False,
        help="Whether advantages A count as -exp(-A), so that bad samples count more than good ones.",
        dynamic=True,
    )
    clip: float = option(
        1e-4,
        help="The ratio counts within 1 ± this. It is small since a log-prob is a mean over the latent's dimensions.",
        validator=check.and_(check.gt(0.0), check.le(1.0)),
        dynamic=True,
    )
    advantage_eps: float = option(
        1e-4, help="Added to the standard deviation that advantages are divided by.", validator=check.ge(0.0)
    )
    advantage_limit: float = option(5.0, help="Advantages count within ± this.", validator=check.gt(0.0), dynamic=True)
    aggregation: Literal["token-mean", "sequence-mean-token-mean"] = option(
        "sequence-mean-token-mean",
        help="How denoising steps, and draws of a demonstration, are averaged: each alike, or each sample alike.",
    )
    kl_weight: float = option(
        0.0,
        help="Weight of the divergence from a frozen reference, in closed form; above 0, the recipe needs [reference].",
        validator=check.ge(0.0),
    )
