"""Differences of Qwen2.5-VL and Qwen3-VL on the way from media to patches and placeholder tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import attrs
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE: Final = "<|image_pad|>"
VIDEO: Final = "<|video_pad|>"


@attrs.frozen(kw_only=True)
class PixelRange:
    """Fewest and most pixels."""

    smallest: int
    largest: int


class FrameSize(Protocol):
    """Height and width at which the frames of a video are seen."""

    def __call__(self, num_frames: int, height: int, width: int, factor: int, pixels: PixelRange) -> tuple[int, int]:
        """Both are multiples of `factor`.

        Raises:
            ValueError: The frames are too long and thin.
        """
        ...


class VideoText(Protocol):
    """Placeholders of a video's patches, as they stand in the text."""

    def __call__(self, times_s: Sequence[float], tokens_per_step: int) -> str:
        """Write them.

        Args:
            times_s: The middle of each temporal patch.
            tokens_per_step: Merged patches of each.
        """
        ...


@attrs.frozen(kw_only=True)
class Family:
    """One family.

    Attributes:
        mean: Subtracted from each colour, which is in 0 to 1.
        std: Divides it then.
        video_pixels: Where no checkpoint says.
        frame_size: Of videos.
        video_text: Of videos.
        video_processor: transformers' name for its processor of videos, which exports name.
        video_lead: Units before a video's first placeholder where other implementations begin to look for its steps.
        has_video_time: Whether the forward takes how long the steps of a video last.
        interleaves: Whether the rotary axes take turns. transformers' model of the family does or does not, whatever
            the config says; other implementations read it there.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    video_pixels: PixelRange
    frame_size: FrameSize
    video_text: VideoText
    video_processor: str
    video_lead: int
    has_video_time: bool
    interleaves: bool


def image_text(num_tokens: int) -> str:
    """Placeholders of an image's merged patches."""
    return f"{VISION_START}{IMAGE * num_tokens}{VISION_END}"


def _each_frame(num_frames: int, height: int, width: int, factor: int, pixels: PixelRange) -> tuple[int, int]:  # noqa: ARG001 - the other family needs it
    size: tuple[int, int] = resize_frame(height, width, factor, min_pixels=pixels.smallest, max_pixels=pixels.largest)
    return size


def _all_frames(num_frames: int, height: int, width: int, factor: int, pixels: PixelRange) -> tuple[int, int]:
    size: tuple[int, int] = resize_video(
        num_frames, height, width, factor=factor, min_pixels=pixels.smallest, max_pixels=pixels.largest
    )
    return size


def _one_run(times_s: Sequence[float], tokens_per_step: int) -> str:
    return f"{VISION_START}{VIDEO * (tokens_per_step * len(times_s))}{VISION_END}"


def _run_each_time(times_s: Sequence[float], tokens_per_step: int) -> str:
    run = f"{VISION_START}{VIDEO * tokens_per_step}{VISION_END}"
    return "".join(f"<{time_s:.1f} seconds>{run}" for time_s in times_s)


FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2_5_vl": Family(
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        video_pixels=PixelRange(smallest=128 * 28 * 28, largest=768 * 28 * 28),
        frame_size=_each_frame,
        video_text=_one_run,
        video_processor="Qwen2VLVideoProcessor",
        video_lead=0,
        has_video_time=True,
        interleaves=False,
    ),
    "qwen3_vl": Family(
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        video_pixels=PixelRange(smallest=4 * 32 * 32, largest=24576 * 32 * 32),
        frame_size=_all_frames,
        video_text=_run_each_time,
        video_processor="Qwen3VLVideoProcessor",
        video_lead=1,
        has_video_time=False,
        interleaves=True,
    ),
}
"""By `model_type`. Source: arXiv 2502.13923 (Qwen2.5-VL), arXiv 2511.21631 (Qwen3-VL), and their checkpoints' files."""
