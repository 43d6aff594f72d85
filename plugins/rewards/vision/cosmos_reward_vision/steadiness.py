"""Reward `temporal-consistency`: how little changes from frame to frame."""

from __future__ import annotations

import itertools
from typing import Final

import attrs
import numpy as np
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_reward_vision.frames import CAPABILITIES, frames_of


@attrs.frozen(kw_only=True)
class SteadinessOptions:
    """Options of `temporal-consistency`."""

    free: float = option(
        0.0,
        help="Change that costs nothing, from 0 to 1: without it, the best video is one that stands still.",
        validator=check.and_(check.ge(0.0), check.lt(1.0)),
    )


class Steadiness:
    """Minus the mean absolute difference of successive frames, channels from 0 to 1, as far as it is above `free`.

    The difference is averaged over pixels and channels; what is free is so for each pair of frames.
    """

    def __init__(self, options: SteadinessOptions, context: RewardContext) -> None:
        self._free: Final = options.free
        self._name: Final = context.name

    def score(self, completion: Completion) -> Score:
        """Compare successive frames.

        Raises:
            DataError: Nothing was rendered, or a single frame.
        """
        frames_FHWC = frames_of(completion, self._name)
        if len(frames_FHWC) < 2:
            raise DataError(f"reward {self._name}: an image has no successive frames; use it for videos")
        changes = np.array(
            [
                np.abs(after.astype(np.int16) - before).mean(dtype=np.float64) / 255.0
                for before, after in itertools.pairwise(frames_FHWC)
            ]
        )
        value = -float(np.maximum(changes - self._free, 0.0).mean())
        return Score(value=value, details={"change": round(float(changes.mean()), 4)})


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the consistency."""
    return Provider(create=Steadiness, options=SteadinessOptions, capabilities=CAPABILITIES)
