"""Reward `sharpness`: how much detail the frames have."""

from __future__ import annotations

import math
from typing import Final

import attrs
import numpy as np

from cosmos_core.config import option
from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_reward_vision.frames import CAPABILITIES, Grey, frames_of, luma_of


@attrs.frozen(kw_only=True)
class SharpnessOptions:
    """Options of `sharpness`."""

    logarithm: bool = option(
        True, help="Whether the score is log(1 + variance), which grows less with noise, instead of the variance."
    )


class Sharpness:
    """The variance of the Laplacian of a frame's luma (0 to 255), averaged over frames. Noise is sharp, too.

    Source: Pech-Pacheco et al., Diatom autofocusing in brightfield microscopy, ICPR 2000, section 3: the measure LAP
    with the kernel of four neighbours; pixels at the edge of the frame are left out.
    """

    def __init__(self, options: SharpnessOptions, context: RewardContext) -> None:
        self._logarithm: Final = options.logarithm
        self._name: Final = context.name

    def score(self, completion: Completion) -> Score:
        """Measure the sharpness.

        Raises:
            DataError: Nothing was rendered, or frames of less than 3 x 3 pixels.
        """
        frames_FHWC = frames_of(completion, self._name)
        height, width = frames_FHWC.shape[1:3]
        if min(height, width) < 3:
            raise DataError(f"reward {self._name}: frames of {height} x {width} pixels have no inside; render 3 x 3 on")
        variance = float(np.mean([_laplacian(luma_of(each)).var(dtype=np.float64) for each in frames_FHWC]))
        return Score(
            value=math.log1p(variance) if self._logarithm else variance, details={"variance": round(variance, 3)}
        )


def _laplacian(luma_HW: Grey) -> Grey:
    """The four neighbours of each inner pixel minus four times itself: float32 [H - 2, W - 2]."""
    inner = luma_HW[1:-1, 1:-1]
    around = luma_HW[:-2, 1:-1] + luma_HW[2:, 1:-1] + luma_HW[1:-1, :-2] + luma_HW[1:-1, 2:]
    return around - 4.0 * inner


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the sharpness."""
    return Provider(create=Sharpness, options=SharpnessOptions, capabilities=CAPABILITIES)
