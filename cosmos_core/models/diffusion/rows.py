"""Rows of a dataset as what conditions the denoising: captions become embeddings, media given frames, videos samples.

Images and videos are local files and `data:` URLs; nothing is fetched while training. A video is what PyAV opens; an
image is a video of one frame; `.npy` holds frames as they are (uint8 [F, h, w, 3]), and a folder of images is a video
whose frames are in the order of their names.

Shape legend: C channels, T latent frames, H and W latent height and width, L tokens of the text, E their width,
F frames of a video, h and w its height and width in pixels.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from cosmos_core.data.npy import is_npy, read_npy
from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.diffusion.packing import generator_of
from cosmos_core.models.vision.images import inline_bytes, local_file, local_path, open_image, shown
from cosmos_core.types import Prompt
from cosmos_core.types.prompt import GIVEN_FRAMES


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

_IMAGES: Final = (b"\x89PNG", b"\xff\xd8\xff", b"BM")
_HEAD: Final = 16


@attrs.frozen(kw_only=True)
class FrameReader:
    """Reads images and videos as frames of the size and the rate that is generated, within the limits of the options.

    Attributes:
        options: Of a video of another rate the frames nearest in time are taken.
        num_frames: Most frames that are wanted.
        from_end: Whether the last frames are wanted, not the first; of a video these are held at their own size, where
            else no more than one is.
    """

    options: DiffusionOptions
    num_frames: int
    from_end: bool = False

    def read(self, location: str) -> torch.Tensor:
        """Frames uint8 [F, height, width, 3] of what is at a path, a `file:` URL, or a `data:` URL.

        Raises:
            DataError: There is nothing, it cannot be read, is larger than a limit, or would have to be fetched.
        """
        source: Path | io.BytesIO
        if location.startswith("data:"):
            held = inline_bytes(location, "data:", "in base64, data:video/mp4;base64,…")
            source, num_bytes, head = io.BytesIO(held), len(held), held[:_HEAD]
        else:
            if local_path(location).is_dir():
                return self._folder(local_path(location), location)
            source = local_file(location)
            num_bytes = source.stat().st_size
            with source.open("rb") as file:
                head = file.read(_HEAD)
        self._check_bytes(num_bytes, location)
        if is_npy(head):
            return self._stored(source, location)
        if head.startswith(_IMAGES) or (head.startswith(b"RIFF") and b"WEBP" in head):
            return self._fitted([self._image(source, location)], location)
        return self._video(source, location)

    def _check_bytes(self, num_bytes: int, location: str) -> None:
        most = self.options.max_media_bytes
        if num_bytes > most:
            raise DataError(
                f"media {shown(location)}: {num_bytes:,} bytes are more than the {most:,} of "
                "model.options.max_media_bytes"
            )

    def _check_size(self, height: int, width: int, location: str) -> None:
        most = self.options.max_media_pixels
        scale = max(self.options.height / max(height, 1), self.options.width / max(width, 1), 1.0)
        if height * width * scale**2 > most:
            raise DataError(
                f"media {shown(location)}: frames of {width} x {height}"
                f"{'' if scale == 1.0 else f', scaled by {scale:.3g},'} are more than the "
                f"{most:,} pixels of model.options.max_media_pixels"
            )

    def _alike(
        self, frames: Iterable[_Sized], size_of: Callable[[_Sized], tuple[int, int]], location: str
    ) -> Iterator[_Sized]:
        """The frames, each looked at before it is passed on: none is too large, or of another size than the first."""
        first: tuple[int, int] | None = None
        for number, frame in enumerate(frames):
            height, width = size_of(frame)
            if first is None:
                self._check_size(height, width, location)
                first = height, width
            if (height, width) != first:
                raise DataError(
                    f"media {shown(location)}: frame {number} is {width} x {height}, and those before it are "
                    f"{first[1]} x {first[0]}; frames are all of one size"
                )
            yield frame

    def _fitted(self, frames: Iterable[Any], location: str) -> torch.Tensor:
        """Arrays uint8 [h, w, 3], each of which is let go when it has been fitted, as one tensor."""
        size = self.options.height, self.options.width
        fit = [fitted(torch.from_numpy(frame)[None], *size) for frame in frames]
        if not fit:
            raise DataError(f"media {shown(location)}: a video without frames")
        return torch.cat(fit)

    @property
    def _wanted(self) -> slice:
        return slice(-self.num_frames, None) if self.from_end else slice(self.num_frames)

    def _folder(self, path: Path, location: str) -> torch.Tensor:
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        files = files[self._wanted]
        self._check_bytes(sum(file.stat().st_size for file in files), location)
        if not files:
            raise DataError(f"media {path}: a folder of 0 images is no video")
        images = (self._image(file, str(file)) for file in files)
        return self._fitted(self._alike(images, lambda image: image.shape[:2], location), location)

    def _image(self, source: Path | io.BytesIO, location: str) -> Any:
        return np.array(open_image(source, location, lambda height, width: self._check_size(height, width, location)))

    def _stored(self, source: Path | io.BytesIO, location: str) -> torch.Tensor:
        try:
            array = read_npy(source.getvalue() if isinstance(source, io.BytesIO) else source.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"media {shown(location)}: no readable .npy file: {error}") from error
        shape = array.shape
        if array.dtype != "uint8" or len(shape) != 4 or shape[-1] != 3 or not array.nbytes:
            raise DataError(
                f"media {shown(location)}: {array.dtype} {list(shape)}; frames are uint8 [F, height, width, 3]"
            )
        self._check_size(shape[1], shape[2], location)
        frames = np.frombuffer(array.data, np.uint8).reshape(shape)
        return self._fitted((frame.copy() for frame in frames[self._wanted]), location)

    def _video(self, source: Path | io.BytesIO, location: str) -> torch.Tensor:
        try:
            import av  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise DataError(f"media {shown(location)}: reading videos needs PyAV: pip install av") from error
        try:
            file = str(source) if isinstance(source, Path) else source
            with av.open(file, "r", metadata_errors="replace") as container:
                if not container.streams.video:
                    raise DataError(f"media {shown(location)}: the file has no video in it")
                stream = container.streams.video[0]
                self._check_size(stream.height, stream.width, location)
                decoded = self._alike(container.decode(stream), lambda frame: (frame.height, frame.width), location)
                number, fps = self.num_frames, self.options.fps
                nearest = _at_rate(decoded, float(stream.average_rate or fps), fps)
                taken = deque(nearest, maxlen=number) if self.from_end else islice(nearest, number)
                return self._fitted((frame.to_ndarray(format="rgb24") for frame in taken), location)
        except (av.FFmpegError, OSError, ValueError) as error:
            raise DataError(f"media {shown(location)}: no readable video: {error}") from error


def _at_rate(decoded: Iterable[Any], native: float, wanted: float) -> Iterator[Any]:
    """The frame nearest to each moment k / wanted."""
    taken = 0
    for number, frame in enumerate(decoded):
        while round(taken * native / wanted) == number:
            taken += 1
            yield frame


_EMBEDDING: Final = "text_embedding"
"""The key of a row's metadata that names a file with its embedding."""


def table_embedding(words: str, length: int, width: int) -> torch.Tensor:
    """float32 [L, E]: each word is a standard normal vector drawn from a hash of it; an empty text has no words.

    Raises:
        DataError: There are more words than the length.
    """
    found = words.split()
    if len(found) > length:
        raise DataError(
            f"a prompt of {len(found)} words, and model.options.text_length is {length}; raise it or shorten the prompt"
        )
    seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big") for word in found]
    rows = [torch.randn(width, generator=generator_of(seed, 0)) for seed in seeds]
    return torch.stack(rows) if rows else torch.zeros(0, width)


def file_embedding(location: str, length: int, width: int) -> torch.Tensor:
    """float32 [L, E] from the only tensor of a safetensors file, or the one called `text`.

    Raises:
        DataError: The file cannot be read, or holds nothing of this width and at most this length.
    """
    try:
        tensors = load_file(Path(location))
    except (OSError, SafetensorError) as error:
        raise DataError(f"text embedding {location!r}: no readable safetensors file: {error}") from error
    found = tensors.get("text", next(iter(tensors.values())) if len(tensors) == 1 else None)
    if found is None:
        raise DataError(
            f"text embedding {location!r}: tensors {', '.join(tensors) or 'none'}; there is one, or one called 'text'"
        )
    if found.ndim == 3 and len(found) == 1:
        found = found[0]
    if found.ndim != 2 or found.shape[1] != width:
        raise DataError(f"text embedding {location!r}: shape {list(found.shape)}; the model takes [tokens, {width}]")
    if len(found) > length:
        raise DataError(
            f"text embedding {location!r}: {len(found)} tokens are more than the {length} of model.options.text_length"
        )
    if not bool(torch.isfinite(found).all()):
        raise DataError(f"text embedding {location!r}: some values are not finite")
    return found.float()


GIVEN: Final = "given"
IS_GIVEN: Final = "is_given"
TEXT: Final = "text"
_GIVEN_FROM: Final = "given_from"


class RowReader:
    """Reads what rows give to a world model: pixels of images and videos, embeddings of captions."""

    def __init__(self, family: Family) -> None:
        self._family: Final = family

    def read_pixels(self, location: str, num_frames: int, *, from_end: bool = False) -> torch.Tensor:
        """float32 [3, F, h, w] in [-1, 1]: the first or last frames of a video, of the size that is generated."""
        options = self._family.options
        frames = FrameReader(options=options, num_frames=num_frames, from_end=from_end).read(location)
        if len(frames) < num_frames:
            raise DataError(
                f"media {shown(location)}: {len(frames)} frames at {options.fps:g} a second are fewer than the "
                f"{num_frames} that are needed: too short; lower num_frames or fps in [model.options], or leave the "
                "row out"
            )
        return pixels_of(frames)

    def given_pixels(self, prompt: Prompt) -> torch.Tensor | None:
        """The frames that a row gives: an image, the last frames of a video, or the first ones of its demonstration.

        They are float32 [3, F, h, w] in [-1, 1]; None where there are none. What is generated goes on where a video
        ends, as in the pipelines of diffusers; a clip of which the beginning is given is the row's demonstration, or
        `metadata.given_from` is "start". How many frames a video gives its `metadata.num_given_frames` says, else 1. A
        DataError says that there are several, or they cannot be used.
        """
        number = self.num_given(prompt)
        if len(prompt.media) > 1:
            raise DataError(f"{len(prompt.media)} media in a row; a world model is given one image or video")
        if prompt.media:
            # A row's own continuation begins with the video that it shows.
            end = prompt.metadata.get(_GIVEN_FROM, "start" if prompt.media[0] == prompt.demonstration else "end")
            if end not in ("start", "end"):
                raise DataError(f"metadata.{_GIVEN_FROM} is {end!r}; frames are given from the 'start' or the 'end'")
            return self.read_pixels(prompt.media[0], number or 1, from_end=end == "end")
        if not number:
            return None
        if prompt.demonstration is None:
            raise DataError(f"metadata.{GIVEN_FRAMES} is {number}, and the row has neither media nor a demonstration")
        return self.read_pixels(prompt.demonstration, number)

    def num_given(self, prompt: Prompt) -> int:
        """The number of frames that a row gives by its metadata; 0 if it does not say."""
        number, most = prompt.metadata.get(GIVEN_FRAMES, 0), self._family.options.num_frames
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < most:
            raise DataError(
                f"metadata.{GIVEN_FRAMES} is {number!r}; it is a number of frames below the {most} of a video"
            )
        temporal = self._family.codec.temporal
        if number and (number - 1) % temporal:
            raise DataError(f"metadata.{GIVEN_FRAMES} is {number}; the autoencoder takes 1 + a multiple of {temporal}")
        return number

    def embedding(self, prompt: Prompt) -> torch.Tensor:
        """float32 [L, E], of a row's caption."""
        if not isinstance(prompt.text, str):
            raise DataError("the row's text is a chat, and a world model takes a caption: plain text")
        location = prompt.metadata.get(_EMBEDDING)
        return self._embedded(prompt.text, None if location is None else str(location))

    def _embedded(self, words: str, location: str | None) -> torch.Tensor:
        """The embedding of words, or the one that stands in a file for them."""
        options, width = self._family.options, self._family.text_width
        if location is not None:
            return file_embedding(location, options.text_length, width)
        if options.text == "table":
            return table_embedding(words, options.text_length, width)
        return self._family.encode_words(words)

    def filled(self, text_LE: torch.Tensor) -> torch.Tensor:
        """An embedding with rows of zeros up to `text_length`."""
        length = self._family.options.text_length
        if len(text_LE) > length:
            raise DataError(f"a text of {len(text_LE)} tokens, and model.options.text_length is {length}")
        return nn.functional.pad(text_LE, (0, 0, 0, length - len(text_LE)))

    @functools.cached_property
    def negative(self) -> torch.Tensor:
        """float32 [L, E], what guidance leads away from."""
        options = self._family.options
        words, location = options.negative_prompt, options.negative_embedding
        if words is None:
            # A table knows nothing of what encoders were told.
            is_told = options.text == "encoder" and location is None
            words = self._family.default_negative_prompt if is_told else ""
        with self._family.on_cpu():
            return self.filled(self._embedded(words, location))
