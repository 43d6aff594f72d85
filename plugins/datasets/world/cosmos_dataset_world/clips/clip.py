"""The parts of a clip that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

VIDEOS: Final = (".mp4", ".webm", ".mkv", ".mov", ".avi")
IMAGES: Final = (".png", ".jpg", ".jpeg", ".webp")
EMBEDDINGS: Final = (".safetensors",)
PICKLES: Final = (".pickle", ".pkl")


@attrs.frozen(kw_only=True)
class Part:
    """A file of a clip.

    Attributes:
        name: What it is called where it is.
        size_bytes: How large it is there.
        path: Where it is on this machine; None if it is not fetched yet.
    """

    name: str
    size_bytes: int
    path: Path | None = None


@attrs.frozen(kw_only=True)
class Clip:
    """A caption and its files, each None where it is not there.

    Attributes:
        name: What the files have in common.
        caption: As it is written.
        caption_name: What it is called where it is, or would be.
        video: The video.
        image: A picture that is given to the model.
        embedding: What a text encoder made of the caption.
    """

    name: str
    caption: str | None
    caption_name: str
    video: Part | None = None
    image: Part | None = None
    embedding: Part | None = None
