"""Images and videos that rows name: local files and `data:` URLs. Nothing is fetched while training.

A video is what PyAV opens; an image is a video of one frame; `.npy` holds frames as they are (uint8 [F, h, w, 3]), and
a folder of images is a video whose frames are in the order of their names.

Shape legend: F frames, h and w height and width in pixels.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs
import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.policy.modeling.sight.images import local_path, open_image, shown

_NUMPY: Final = b"\x93NUMPY"
_IMAGES: Final = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"RIFF")
_WEBP: Final = b"WEBP"
_HEAD: Final = 16


@attrs.frozen(kw_only=True)
class Limits:
    """What is too much to read.

    Attributes:
        num_bytes: Of a file.
        num_pixels: Of a frame.
    """

    num_bytes: int
    num_pixels: int


@attrs.frozen(kw_only=True, eq=False)
class Film:
    """Frames of an image or a video, uint8 [F, h, w, 3], with their rate; 0 where there is none, as of an image."""

    frames: torch.Tensor
    fps: float


def read_film(location: str, limits: Limits, *, most: int | None = None, fps: float | None = None) -> Film:
    """Read what is at a location.

    Args:
        location: A path, a `file:` URL, or a `data:` URL.
        limits: What is refused.
        most: How many frames are wanted, from the first one; None for all.
        fps: At which rate they are wanted: of a video of another rate the frames nearest in time are taken.

    Raises:
        DataError: There is nothing, it cannot be read, is larger than a limit, or would have to be fetched.
    """
    source, size = _source(location)
    if size > limits.num_bytes:
        raise DataError(
            f"media {shown(location)}: {size:,} bytes are more than the {limits.num_bytes:,} of "
            "model.options.max_media_bytes"
        )
    if isinstance(source, Path) and source.is_dir():
        return _folder(source, limits, most)
    head = _head(source)
    if head.startswith(_NUMPY):
        return _stored(source, location, limits, most)
    if head.startswith(_IMAGES[:3]) or (head.startswith(_IMAGES[3]) and _WEBP in head):
        return Film(frames=_image(source, location, limits)[None], fps=0.0)
    return _video(source, location, limits, most=most, fps=fps)


def _source(location: str) -> tuple[Path | io.BytesIO, int]:
    if location.startswith("data:"):
        head, _, data = location.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"media {shown(location)}: a data URL is in base64, data:video/mp4;base64,…")
        try:
            held = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise DataError(f"media {shown(location)}: no base64: {error}") from error
        return io.BytesIO(held), len(held)
    path = local_path(location)
    if path.is_dir():
        return path, 0
    if not path.is_file():
        raise DataError(f"media {shown(location)}: no such file")
    return path, path.stat().st_size


def _head(source: Path | io.BytesIO) -> bytes:
    if isinstance(source, io.BytesIO):
        return source.getvalue()[:_HEAD]
    with source.open("rb") as file:
        return file.read(_HEAD)


def _image(source: Path | io.BytesIO, location: str, limits: Limits) -> torch.Tensor:
    image = open_image(source, location)
    _check_pixels(location, image.height, image.width, limits)
    return torch.from_numpy(np.array(image))


def _folder(path: Path, limits: Limits, most: int | None) -> Film:
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    frames = [_image(file, str(file), limits) for file in files[:most]]
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise DataError(f"media {path}: a folder of {len(frames)} images that are not all of one size is no video")
    return Film(frames=torch.stack(frames), fps=0.0)


def _stored(source: Path | io.BytesIO, location: str, limits: Limits, most: int | None) -> Film:
    try:
        frames: Any = np.load(source, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"media {shown(location)}: no readable .npy file: {error}") from error
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise DataError(
            f"media {shown(location)}: {frames.dtype} {list(frames.shape)}; frames are uint8 [F, height, width, 3]"
        )
    _check_pixels(location, frames.shape[1], frames.shape[2], limits)
    return Film(frames=torch.from_numpy(np.ascontiguousarray(frames[:most])), fps=0.0)


def _video(source: Path | io.BytesIO, location: str, limits: Limits, *, most: int | None, fps: float | None) -> Film:
    av = _pyav(location)
    try:
        with av.open(str(source) if isinstance(source, Path) else source) as container:
            if not container.streams.video:
                raise DataError(f"media {shown(location)}: the file has no video in it")
            stream = container.streams.video[0]
            _check_pixels(location, stream.height, stream.width, limits)
            native = float(stream.average_rate or 0.0)
            decoded = (frame.to_ndarray(format="rgb24") for frame in container.decode(stream))
            frames = list(_at_rate(decoded, native, fps or native, most))
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"media {shown(location)}: no readable video: {error}") from error
    if not frames:
        raise DataError(f"media {shown(location)}: a video without frames")
    return Film(frames=torch.from_numpy(np.stack(frames)), fps=fps or native)


def _at_rate(decoded: Iterator[Any], native: float, wanted: float, most: int | None) -> Iterator[Any]:
    """The frame nearest to each moment k / wanted."""
    taken = 0
    for number, frame in enumerate(decoded):
        while (most is None or taken < most) and (native <= 0 or round(taken * native / wanted) == number):
            taken += 1
            yield frame
            if native <= 0:
                break
        if most is not None and taken >= most:
            return


def _check_pixels(location: str, height: int, width: int, limits: Limits) -> None:
    if height * width > limits.num_pixels:
        raise DataError(
            f"media {shown(location)}: frames of {width} x {height} are more than the {limits.num_pixels:,} pixels of "
            "model.options.max_media_pixels"
        )


def _pyav(location: str) -> ModuleType:
    try:
        import av  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise DataError(f"media {shown(location)}: reading videos needs PyAV: pip install av") from error
    return av
