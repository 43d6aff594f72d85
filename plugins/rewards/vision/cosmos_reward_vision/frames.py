"""The frames of a completion, for rewards that look at them.

Shape suffixes: F frames, H height, W width, C the three channels red, green and blue.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, RewardCapabilities
from cosmos_core.types import Prompt

CAPABILITIES: Final = RewardCapabilities(payload_kinds=frozenset({"media"}))

Frames = npt.NDArray[np.uint8]
Grey = npt.NDArray[np.float32]

_LUMA_C: Final = np.array([0.2126, 0.7152, 0.0722], np.float32)


def frames_of(completion: Completion, name: str) -> Frames:
    """The frames of a completion: uint8 [F, H, W, C]; an image is one frame.

    Args:
        completion: What is scored.
        name: Of the reward, for messages.

    Raises:
        DataError: It was not rendered.
    """
    media = completion.media
    if media is None:
        raise DataError(
            f"reward {name}: the completion has no frames; use an engine that renders what it generates (`renders` in "
            "`cosmos plugins show engine NAME`)"
        )
    array = media.arrays["frames"]
    return np.frombuffer(array.data, np.uint8).reshape(array.shape)


def some_of(frames_FHWC: Frames, most: int) -> Frames:
    """At most so many frames, evenly spread from the first to the last."""
    number = len(frames_FHWC)
    if number <= most:
        return frames_FHWC
    places = np.linspace(0, number - 1, most).round().astype(np.intp)
    some_FHWC: Frames = frames_FHWC[places]
    return some_FHWC


def mean_of(frames_FHWC: Frames) -> npt.NDArray[np.float64]:
    """The mean of each channel, 0 to 255: float64 [C]."""
    num_frames, height, width, channels = frames_FHWC.shape
    # Sums of long rows are many times as fast as those of three numbers.
    sums = frames_FHWC.reshape(num_frames * height, width * channels).sum(axis=0, dtype=np.uint64)
    mean_C: npt.NDArray[np.float64] = sums.reshape(width, channels).sum(axis=0) / (num_frames * height * width)
    return mean_C


def luma_of(values_C: npt.NDArray[Any]) -> Grey:
    """Luma of whatever has channels as its last dim, in their unit: float32, without that dim.

    Source: ITU-R BT.709-6, section 3, on values as they are displayed.
    """
    luma: Grey = values_C.astype(np.float32) @ _LUMA_C
    return luma


def text_of(prompt: Prompt) -> str:
    """A prompt as one text."""
    return prompt.text if isinstance(prompt.text, str) else "\n".join(turn.content for turn in prompt.text)
