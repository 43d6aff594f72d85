"""Images and videos of held-out samples, kept in the run's folder for people: `media/step-N/row-K.*`.

Beside each lies a strip of some of its frames, `row-K.strip.webp`, which the report shows.

Shape legend: F frames, h and w height and width in pixels.
"""

from __future__ import annotations

import importlib
import logging
import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from cosmos_core.storage.parts import whole
from cosmos_core.types import Payload

FOLDER: Final = "media"
KEPT_ROWS: Final = 8
"""Held-out rows whose media are kept, the first ones: those whose completions the controller keeps."""

_STRIP_FRAMES: Final = 8
_STRIP_SIDE: Final = 160
_LEAST_SIDE: Final = 64
_LOG: Final = logging.getLogger(__name__)

Frames = npt.NDArray[np.uint8]


class MediaWriter:
    """Writes media into the folder of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._has_failed = False

    def keep(self, version: int, row: int, media: Payload) -> str:
        """Write the media of a held-out row: `frames` uint8 [F, h, w, 3] and `fps`; gives where, from the run's folder.

        Empty for rows that are not kept, and where the folder cannot be written to, which is logged once.
        """
        if row >= KEPT_ROWS:
            return ""
        place = Path(FOLDER) / f"step-{version}" / f"row-{row}"
        try:
            written = write_media(media, self._directory / place)
            _save(_strip(_frames(media)), self._directory / f"{place}.strip.webp", quality=90)
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("media of held-out samples are not kept: %s cannot be written: %s", place, error)
            self._has_failed = True
            return ""
        return f"{place}{written.suffix}"


def write_media(media: Payload, path: Path) -> Path:
    """Write an image (PNG), or a video: MP4, or an animated WebP where PyAV is not installed or has no encoder.

    The media are `frames` uint8 [F, h, w, 3] and `fps`; the suffix is added to the path, and folders are made.

    Raises:
        OSError: It cannot be written there.
    """
    fps = media.arrays.get("fps")
    rate = float(np.frombuffer(fps.data, np.float32)[0]) if fps is not None else 0.0
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{path.name}{_write(_frames(media), rate, path)}")


def _frames(media: Payload) -> Frames:
    """Frames, those of a few pixels made large enough to be looked at; even sides, which videos need."""
    held = media.arrays["frames"]
    frames = np.frombuffer(held.data, np.uint8).reshape(held.shape)
    factor = max(1, math.ceil(_LEAST_SIDE / max(1, min(frames.shape[1:3]))))
    larger = frames.repeat(factor, 1).repeat(factor, 2)
    if len(frames) == 1:
        return larger
    return larger[:, : larger.shape[1] // 2 * 2, : larger.shape[2] // 2 * 2]


def _write(frames: Frames, fps: float, path: Path) -> str:
    """Write an image or a video; its suffix."""
    if len(frames) == 1:
        _save(Image.fromarray(frames[0]), path.with_name(f"{path.name}.png"))
        return ".png"
    rate = fps if math.isfinite(fps) and fps > 0 else 8.0
    if _write_video(frames, rate, path.with_name(f"{path.name}.mp4")):
        return ".mp4"
    images = [Image.fromarray(frame) for frame in frames]
    duration = max(1, round(1000 / rate))
    more: dict[str, Any] = {"save_all": True, "append_images": images[1:], "duration": duration, "loop": 0}
    _save(images[0], path.with_name(f"{path.name}.webp"), quality=90, **more)
    return ".webp"


def _write_video(frames: Frames, fps: float, path: Path) -> bool:
    """Write an MP4; False where PyAV is not installed, or has no encoder."""
    try:
        av: Any = importlib.import_module("av")
    except ImportError:
        return False
    try:
        with whole(path) as partial, av.open(str(partial), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            container.mux(stream.encode())
    except (av.FFmpegError, ValueError) as error:
        if isinstance(error, OSError):
            raise
        return False
    return True


def _strip(frames: Frames) -> Image.Image:
    """Some frames side by side, evenly chosen, the first and the last among them."""
    number = min(len(frames), _STRIP_FRAMES)
    chosen = [Image.fromarray(frames[round(place)]) for place in np.linspace(0, len(frames) - 1, number)]
    for image in chosen:
        image.thumbnail((_STRIP_SIDE, _STRIP_SIDE))
    width, height = chosen[0].size
    strip = Image.new("RGB", (width * number, height))
    for index, image in enumerate(chosen):
        strip.paste(image, (index * width, 0))
    return strip


def _save(image: Image.Image, path: Path, **how: Any) -> None:
    with whole(path) as partial:
        image.save(partial, format=path.suffix[1:], **how)
