"""Reward `jpeg-compressibility`: how small the frames are as JPEG."""

from __future__ import annotations

import io
from typing import Final

import attrs
from attrs import validators as check
from PIL import Image

from cosmos_core.config import option
from cosmos_core.protocols import Completion, Provider, Reward, RewardContext, Score, hookimpl
from cosmos_reward_vision.frames import CAPABILITIES, frames_of, some_of


@attrs.frozen(kw_only=True)
class JpegOptions:
    """Options of `jpeg-compressibility`."""

    quality: int = option(95, help="Of the JPEG.", validator=check.and_(check.ge(1), check.le(95)))
    frames: int = option(8, help="Most frames that are looked at, spread evenly.", validator=check.ge(1))


class JpegCompressibility:
    """Minus the kilobytes (1000 bytes) of a frame, averaged over frames. A weight below 0 rewards detail instead.

    Source: DDPO, arXiv 2305.13301, section 5.1. Deviation: of a video, the mean of some frames.
    """

    def __init__(self, options: JpegOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name

    def score(self, completion: Completion) -> Score:
        """Compress the frames.

        Raises:
            DataError: Nothing was rendered.
        """
        frames_FHWC = some_of(frames_of(completion, self._name), self._options.frames)
        sizes = []
        for frame_HWC in frames_FHWC:
            file = io.BytesIO()
            Image.fromarray(frame_HWC).save(file, "JPEG", quality=self._options.quality)
            sizes.append(file.tell() / 1000.0)
        return Score(value=-sum(sizes) / len(sizes), details={"frames": len(sizes)})


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the compressibility."""
    return Provider(create=JpegCompressibility, options=JpegOptions, capabilities=CAPABILITIES)
