"""Images and videos that rows name: local files and `data:` URLs. Nothing is fetched while training.

A video is what PyAV opens; an image is a video of one frame; `.npy` holds frames as they are (uint8 [F, h, w, 3]), and
a folder of images is a video whose frames are in the order of their names.

Shape legend: F frames, h and w height and width in pixels.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import attrs
import numpy as np
import torch
from torch.nn import functional

from cosmos_core.data.npy import is_npy, read_npy
from cosmos_core.errors import DataError
from cosmos_core.models.vision.images import image_size, local_path, open_image, shown


def pixels_of(frames: torch.Tensor) -> torch.Tensor:
    """float32 [3, F, h, w] in [-1, 1], from uint8 [F, h, w, 3]."""
    # Rearranged as bytes, and changed in place: a clip is large.
    return frames.permute(3, 0, 1, 2).contiguous().float().div_(127.5).sub_(1.0)


def frames_of(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [F, h, w, 3], from [3, F, h, w] in [-1, 1]; what lies outside is clipped."""
    levels = ((pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round()
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def fitted(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Frames [F, h, w, 3] scaled until they cover a size, and cut to it around their middle, uint8."""
    if frames.shape[1:3] == (height, width):
        return frames
    scale = max(height / frames.shape[1], width / frames.shape[2])
    size = max(height, round(frames.shape[1] * scale)), max(width, round(frames.shape[2] * scale))
    scaled = functional.interpolate(
        frames.permute(0, 3, 1, 2).float(), size=size, mode="bilinear", antialias=True, align_corners=False
    )
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cut = scaled[:, :, top : top + height, left : left + width]
    return cut.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


_Sized = TypeVar("_Sized")

_IMAGES: Final = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"RIFF")
_WEBP: Final = b"WEBP"
_HEAD: Final = 16


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of what is read: bytes of a file, pixels of a frame."""

    num_bytes: int
    num_pixels: int


@attrs.frozen(kw_only=True, eq=False)
class Film:
    """Frames of an image or a video, uint8 [F, h, w, 3], with their rate; 0 where there is none, as of an image."""

    frames: torch.Tensor
    fps: float


def read_film(
    location: str,
    limits: Limits,
    *,
    most: int | None = None,
    fps: float | None = None,
    size: tuple[int, int] | None = None,
    from_end: bool = False,
) -> Film:
    """Read what is at a location; of a video no more than a frame is held at its own size.

    Args:
        location: A path, a `file:` URL, or a `data:` URL.
        limits: What is refused.
        most: How many frames are wanted; None for all.
        fps: At which rate they are wanted: of a video of another rate the frames nearest in time are taken.
        size: Height and width that frames are fitted to (see `fitted`); None for their own.
        from_end: Whether the last frames are wanted, not the first; of a video these are held at their own size.

    Raises:
        DataError: There is nothing, it cannot be read, is larger than a limit, or would have to be fetched.
    """
    source, num_bytes = _source(location)
    _check_bytes(location, num_bytes, limits)
    reading = _Reading(location=location, limits=limits, most=most, size=size, from_end=from_end)
    if isinstance(source, Path) and source.is_dir():
        return _folder(source, reading)
    head = _head(source)
    if is_npy(head):
        return _stored(source, reading)
    if head.startswith(_IMAGES[:3]) or (head.startswith(_IMAGES[3]) and _WEBP in head):
        return reading.film([_image(source, location, reading)], 0.0)
    return _video(source, reading, fps)


@attrs.frozen(kw_only=True)
class _Reading:
    """A film that is being read (see `read_film`)."""

    location: str
    limits: Limits
    most: int | None
    size: tuple[int, int] | None
    from_end: bool

    @property
    def part(self) -> slice:
        """The frames that are wanted."""
        return slice(None) if self.most is None else slice(-self.most, None) if self.from_end else slice(self.most)

    def check(self, height: int, width: int) -> None:
        """Refuse frames that are too large, as they are or when they have been scaled."""
        scale = 1.0 if self.size is None else max(self.size[0] / max(height, 1), self.size[1] / max(width, 1), 1.0)
        if height * width * scale**2 > self.limits.num_pixels:
            raise DataError(
                f"media {shown(self.location)}: frames of {width} x {height}"
                f"{'' if scale == 1.0 else f', scaled by {scale:.3g},'} are more than the "
                f"{self.limits.num_pixels:,} pixels of model.options.max_media_pixels"
            )

    def alike(self, frames: Iterable[_Sized], size_of: Callable[[_Sized], tuple[int, int]]) -> Iterator[_Sized]:
        """The frames, each looked at before it is passed on: none is too large, or of another size than the first."""
        first: tuple[int, int] | None = None
        for number, frame in enumerate(frames):
            height, width = size_of(frame)
            if first is None:
                self.check(height, width)
                first = height, width
            if (height, width) != first:
                raise DataError(
                    f"media {shown(self.location)}: frame {number} is {width} x {height}, and those before it are "
                    f"{first[1]} x {first[0]}; frames are all of one size"
                )
            yield frame

    def film(self, frames: Iterable[Any], fps: float) -> Film:
        """A film of frames uint8 [h, w, 3], each of which is let go when it has been fitted."""
        fit = [self._fitted(torch.from_numpy(frame)[None]) for frame in frames]
        if not fit:
            raise DataError(f"media {shown(self.location)}: a video without frames")
        return Film(frames=torch.cat(fit), fps=fps)

    def _fitted(self, frame: torch.Tensor) -> torch.Tensor:
        return frame if self.size is None else fitted(frame, *self.size)


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


def _folder(path: Path, reading: _Reading) -> Film:
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    files = files[reading.part]
    _check_bytes(reading.location, sum(file.stat().st_size for file in files), reading.limits)
    if not files:
        raise DataError(f"media {path}: a folder of 0 images is no video")
    images = (_image(file, str(file), reading) for file in files)
    return reading.film(reading.alike(images, lambda image: image.shape[:2]), 0.0)


def _image(source: Path | io.BytesIO, location: str, reading: _Reading) -> Any:
    attrs.evolve(reading, location=location).check(*image_size(source, location))
    return np.array(open_image(source, location))


def _stored(source: Path | io.BytesIO, reading: _Reading) -> Film:
    try:
        array = read_npy(source.getvalue() if isinstance(source, io.BytesIO) else source.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"media {shown(reading.location)}: no readable .npy file: {error}") from error
    shape = array.shape
    if array.dtype != "uint8" or len(shape) != 4 or shape[-1] != 3 or not array.nbytes:
        raise DataError(
            f"media {shown(reading.location)}: {array.dtype} {list(shape)}; frames are uint8 [F, height, width, 3]"
        )
    reading.check(shape[1], shape[2])
    frames = np.frombuffer(array.data, np.uint8).reshape(shape)
    return reading.film((frame.copy() for frame in frames[reading.part]), 0.0)


def _video(source: Path | io.BytesIO, reading: _Reading, fps: float | None) -> Film:
    location = reading.location
    av = _pyav(location)
    try:
        with av.open(str(source) if isinstance(source, Path) else source, metadata_errors="replace") as container:
            if not container.streams.video:
                raise DataError(f"media {shown(location)}: the file has no video in it")
            stream = container.streams.video[0]
            reading.check(stream.height, stream.width)
            native = float(stream.average_rate or 0.0)
            decoded = reading.alike(container.decode(stream), lambda frame: (frame.height, frame.width))
            taken = _at_rate(decoded, native, fps or native, None if reading.from_end else reading.most)
            if reading.from_end:
                taken = iter(deque(taken, maxlen=reading.most))
            return reading.film((frame.to_ndarray(format="rgb24") for frame in taken), fps or native)
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"media {shown(location)}: no readable video: {error}") from error


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


def _check_bytes(location: str, num_bytes: int, limits: Limits) -> None:
    if num_bytes > limits.num_bytes:
        raise DataError(
            f"media {shown(location)}: {num_bytes:,} bytes are more than the {limits.num_bytes:,} of "
            "model.options.max_media_bytes"
        )


def _pyav(location: str) -> ModuleType:
    try:
        import av  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise DataError(f"media {shown(location)}: reading videos needs PyAV: pip install av") from error
    return av
