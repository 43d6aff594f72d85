"""Reward `brightness`: how bright the frames are, or how near to a brightness."""

from __future__ import annotations

from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_reward_vision.frames import CAPABILITIES, frames_of, luma_of, mean_of


@attrs.frozen(kw_only=True)
class BrightnessOptions:
    """Options of `brightness`."""

    target: float | None = option(
        None,
        help="Brightness that scores 0, the best; the score is minus the distance from it. Absent: the brightness.",
        validator=check.optional(check.and_(check.ge(0.0), check.le(1.0))),
    )


class Brightness:
    """The mean luma of all pixels, from 0 (black) to 1 (white)."""

    def __init__(self, options: BrightnessOptions, context: RewardContext) -> None:
        self._target: Final = options.target
        self._name: Final = context.name

    def score(self, completion: Completion) -> Score:
        """Measure the brightness.

        Raises:
            DataError: Nothing was rendered.
        """
        brightness = float(luma_of(mean_of(frames_of(completion, self._name)))) / 255.0
        value = brightness if self._target is None else -abs(brightness - self._target)
        return Score(value=value, details={"brightness": round(brightness, 4)})


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the brightness."""
    return Provider(create=Brightness, options=BrightnessOptions, capabilities=CAPABILITIES)
