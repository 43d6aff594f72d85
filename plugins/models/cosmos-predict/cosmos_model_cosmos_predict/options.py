"""Options of `cosmos-predict`: those of every world model, and what given frames look like to it."""

from __future__ import annotations

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.models.diffusion import DiffusionOptions


@attrs.frozen(kw_only=True)
class CosmosPredictOptions(DiffusionOptions):
    """The making of conditionings from rows, and the learning of demonstrations."""

    height: int = option(704, help="Pixels from top to bottom of what is generated.", validator=check.ge(1))
    width: int = option(1280, help="Pixels from left to right.", validator=check.ge(1))
    num_frames: int = option(93, help="Frames of a video; 1 for images.", validator=check.ge(1))
    given_time: float = option(
        1e-4,
        help="The time at which frames that are given are shown to the model.",
        validator=[check.ge(0), check.le(1)],
    )
