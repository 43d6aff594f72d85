"""Options of routing."""

from __future__ import annotations

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.models import HuggingFaceOptions


@attrs.frozen(kw_only=True)
class MixtureOptions(HuggingFaceOptions):
    """The making of tokens from prompts, and the spread of tokens over experts."""

    auxiliary_loss: float = option(
        0.0,
        help="Weight of the loss that balances the experts within each sequence, summed over layers; the config's "
        "`router_aux_loss_coef` is not read.",
        validator=check.ge(0.0),
    )
    z_loss: float = option(
        0.0, help="Weight of the loss that keeps router logits small, summed over layers.", validator=check.ge(0.0)
    )
    bias_rate: float = option(
        0.0,
        help="How far a step moves the bias of an expert that has less or more than the mean load, without a loss "
        "(0.001 in DeepSeek-V3); 0 leaves the checkpoint's bias.",
        validator=check.ge(0.0),
    )
    router_replay: bool = option(
        False, help="Whether training uses the experts that the rollout engine recorded, not its own choice."
    )
