"""Images and videos of a prompt, read from local files, folders of frames, `data:` URLs.

A video is a file that PyAV opens, an animated GIF (a file, or within a `data:` URL), or a folder of images. Of a video
only the frames that are seen are kept in memory.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import attrs
import numpy as np
from PIL import Image

from cosmos_core.errors import DataError
from cosmos_core.models.vision.images import IMAGE_ERRORS, inline_bytes, load_image, local_path, open_image, shown

VIDEO_SUFFIXES: Final = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})
ANIMATED_SUFFIX: Final = ".gif"
INLINE_ANIMATION: Final = "data:image/gif"
MIN_FRAMES: Final = 4


@attrs.frozen(kw_only=True, eq=False)
class Still:
    """One image."""

    image: Image.Image


@attrs.frozen(kw_only=True, eq=False)
class Video:
    """The frames of a video that are seen.

    Attributes:
        frames: In order, all of one size.
        times_s: When each is shown, in seconds from the start.
        fps: Frames seen a second.
    """

    frames: Sequence[Image.Image]
    times_s: Sequence[float]
    fps: float


@attrs.frozen(kw_only=True)
class Sampling:
    """The choice of frames of a video.

    Attributes:
        fps: Frames a second.
        max_frames: Most of them.
        folder_fps: Frames a second of a folder of images.
    """

    fps: float
    max_frames: int
    folder_fps: float

    def choose(self, num_frames: int, native_fps: float) -> list[int]:
        """Numbers of the frames that are seen, spread evenly from the first to the last.

        Source: the sampling of transformers' `Qwen3VLVideoProcessor`, here for both families.
        """
        wanted = int(num_frames / native_fps * self.fps)
        chosen = min(max(wanted, MIN_FRAMES), self.max_frames, num_frames)
        return [int(number) for number in np.linspace(0, num_frames - 1, chosen).round()]


def load(location: str, sampling: Sampling) -> Still | Video:
    """Read what is at a location.

    Args:
        location: A path, a `file:` URL, or a `data:` URL with an image or an animation.
        sampling: Which frames of a video are seen.

    Raises:
        DataError: There is nothing, it cannot be read, or it would have to be fetched.
    """
    if location.startswith(INLINE_ANIMATION):
        held = inline_bytes(location, INLINE_ANIMATION, f"an animation in base64, {INLINE_ANIMATION};base64,…")
        return _animation(io.BytesIO(held), shown(location), sampling)
    if location.startswith("data:"):
        return Still(image=load_image(location))
    path = local_path(location)
    if path.is_dir():
        return _folder(path, sampling)
    if not path.is_file():
        raise DataError(f"media {shown(location)}: no such file or folder")
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return _video(path, sampling)
    if path.suffix.lower() == ANIMATED_SUFFIX:
        return _animation(path, str(path), sampling)
    return Still(image=open_image(path, location))


def _folder(path: Path, sampling: Sampling) -> Video:
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"media {path}: a folder of frames without any")
    numbers = sampling.choose(len(files), sampling.folder_fps)
    return _seen(
        str(path), [open_image(files[n], str(files[n])) for n in numbers], numbers, len(files), sampling.folder_fps
    )


def _animation(source: Path | io.BytesIO, name: str, sampling: Sampling) -> Still | Video:
    try:
        with Image.open(source) as image:
            total: int = getattr(image, "n_frames", 1)
            if total == 1:
                return Still(image=image.convert("RGB"))
            native_fps = 1000.0 / (image.info.get("duration") or 100)
            numbers = sampling.choose(total, native_fps)
            frames = []
            for number in numbers:
                image.seek(number)
                frames.append(image.convert("RGB"))
    except IMAGE_ERRORS as error:
        raise DataError(f"media {name}: no readable animation: {error}") from error
    return _seen(name, frames, numbers, total, native_fps)


def _video(path: Path, sampling: Sampling) -> Video:
    av = _pyav(path)
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            if not container.streams.video:
                raise DataError(f"media {path}: the file has no video in it")
            # The container's own count is missing or wrong in many files; decoding without keeping counts truly.
            total = sum(1 for _ in container.decode(video=0))
            native_fps = float(container.streams.video[0].average_rate or 0.0)
        if not total or not native_fps:
            raise DataError(f"media {path}: {total} frames at {native_fps:g} a second are no video")
        numbers = sampling.choose(total, native_fps)
        kept = set(numbers)
        with av.open(str(path), metadata_errors="replace") as container:
            frames = [frame.to_image() for number, frame in enumerate(container.decode(video=0)) if number in kept]
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"media {path}: no readable video: {error}") from error
    return _seen(str(path), frames, numbers, total, native_fps)


def _seen(name: str, frames: Sequence[Image.Image], numbers: Sequence[int], total: int, native_fps: float) -> Video:
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1:
        raise DataError(f"media {name}: frames of different sizes {sorted(sizes)}; a video has one")
    return Video(
        frames=frames,
        times_s=[number / native_fps for number in numbers],
        fps=len(numbers) / total * native_fps,
    )


def _pyav(path: Path) -> ModuleType:
    try:
        import av  # noqa: PLC0415 - an extra of this distribution
    except ImportError as error:
        raise DataError(
            f"media {path}: video files need PyAV; run: pip install 'cosmos-model-qwen-vl[video]', or give a folder "
            "of frames"
        ) from error
    module: ModuleType = av
    return module
