"""Rows of a dataset as what conditions the denoising: captions become embeddings, media given frames, videos samples.

Shape legend: C channels, T latent frames, H and W latent height and width, L tokens of the text, E their width,
F frames of a video.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.diffusion.media import FrameReader, pixels_of
from cosmos_core.models.diffusion.packing import generator_of
from cosmos_core.models.vision.images import shown
from cosmos_core.types import Prompt

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
_NUM_GIVEN: Final = "num_given_frames"
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
        `metadata.given_from` is "start". How many frames a video gives its `metadata.num_given_frames` says, else 1.

        Raises:
            DataError: There are several, or they cannot be used.
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
            raise DataError(f"metadata.{_NUM_GIVEN} is {number}, and the row has neither media nor a demonstration")
        return self.read_pixels(prompt.demonstration, number)

    def num_given(self, prompt: Prompt) -> int:
        """The number of frames that a row gives by its metadata; 0 if it does not say."""
        number, most = prompt.metadata.get(_NUM_GIVEN, 0), self._family.options.num_frames
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < most:
            raise DataError(
                f"metadata.{_NUM_GIVEN} is {number!r}; it is a number of frames below the {most} of a video"
            )
        temporal = self._family.codec.temporal
        if number and (number - 1) % temporal:
            raise DataError(f"metadata.{_NUM_GIVEN} is {number}; the autoencoder takes 1 + a multiple of {temporal}")
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
