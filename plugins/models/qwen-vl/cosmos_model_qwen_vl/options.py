"""Options of `qwen-vl`: those of every Hugging Face model, and how large images and videos are seen."""

from __future__ import annotations

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.models import HuggingFaceOptions


@attrs.frozen(kw_only=True)
class QwenVLOptions(HuggingFaceOptions):
    """The making of tokens and patches from prompts."""

    min_pixels: int | None = option(
        None,
        help="Images of fewer pixels are enlarged to it; left out: as the checkpoint says.",
        validator=check.optional(check.ge(1)),
    )
    max_pixels: int | None = option(
        None,
        help="Images of more pixels are shrunk to it; left out: as the checkpoint says.",
        validator=check.optional(check.ge(1)),
    )
    video_min_pixels: int | None = option(
        None,
        help="The same for videos: of a frame for Qwen2.5-VL, of all frames together for Qwen3-VL.",
        validator=check.optional(check.ge(1)),
    )
    video_max_pixels: int | None = option(None, help="See `video_min_pixels`.", validator=check.optional(check.ge(1)))
    video_fps: float = option(2.0, help="Frames of a video that are seen a second.", validator=check.gt(0.0))
    video_max_frames: int = option(768, help="Most frames that are seen of one video.", validator=check.ge(2))
    folder_fps: float = option(
        2.0, help="Frames a second of a video that is a folder of images.", validator=check.gt(0.0)
    )
