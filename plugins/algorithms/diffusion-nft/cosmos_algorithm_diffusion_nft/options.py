"""Options of `diffusion-nft`."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option


@attrs.frozen(kw_only=True)
class DiffusionNftOptions:
    """Options of `diffusion-nft`."""

    beta: float = option(
        1.0,
        help="How far from the policy towards which one learns the sampler is taken to be: of the velocity v, what is "
        "good is predicted by beta v + (1 - beta) v_old, what is bad by (1 + beta) v_old - beta v.",
        validator=check.gt(0.0),
        dynamic=True,
    )
    spread: Literal["group", "batch"] = option(
        "group",
        help="Whose standard deviation advantages are divided by: of their prompt's rewards, or of the whole batch's.",
    )
    advantage_eps: float = option(
        1e-4, help="Added to the standard deviation that advantages are divided by.", validator=check.ge(0.0)
    )
    advantage_limit: float = option(
        5.0,
        help="An advantage of this is wholly good, of minus this wholly bad, of 0 half of each.",
        validator=check.gt(0.0),
    )
    aggregation: Literal["token-mean", "sequence-mean-token-mean"] = option(
        "sequence-mean-token-mean", help="How draws of a sample are averaged: each alike, or each sample alike."
    )
