"""Rows of a dataset as what conditions the denoising: captions become embeddings, media given frames, videos samples.

Shape legend: C channels, T latent frames, H and W latent height and width, L tokens of the text, E their width,
F frames of a video.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.diffusion.media import Limits, pixels_of, read_film
from cosmos_core.models.diffusion.noising import generator_of
from cosmos_core.models.vision.images import shown
from cosmos_core.types import Prompt

METADATA: str = "text_embedding"
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
    rows = [torch.randn(width, generator=generator_of(_number(word), 0)) for word in found]
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


def _number(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big")


GIVEN: Final = "given"
IS_GIVEN: Final = "is_given"
TEXT: Final = "text"
_NUM_GIVEN: Final = "num_given_frames"
_GIVEN_FROM: Final = "given_from"


class RowReader:
    """Reads what rows give to a world model: pixels of images and videos, embeddings of captions."""

    def __init__(self, family: Family) -> None:
        self._family: Final = family
        self._negative: torch.Tensor | None = None

    def read_pixels(self, location: str, num_frames: int, *, from_end: bool = False) -> torch.Tensor:
        """float32 [3, F, h, w] in [-1, 1]: the first or last frames of a video, of the size that is generated."""
        options = self._family.options
        limits = Limits(num_bytes=options.max_media_bytes, num_pixels=options.max_media_pixels)
        size = options.height, options.width
        film = read_film(location, limits, most=num_frames, fps=options.fps, size=size, from_end=from_end)
        found = len(film.frames)
        if found < num_frames:
            raise DataError(
                f"media {shown(location)}: {found} frames at {options.fps:g} a second are fewer than the {num_frames} "
                "that are needed: too short; lower num_frames or fps in [model.options], or leave the row out"
            )
        return pixels_of(film.frames)

    def given_pixels(self, prompt: Prompt) -> torch.Tensor | None:
        """The frames that a row gives: an image, the last frames of a video, or the first ones of its demonstration.

        What is generated goes on where a video ends, as in the pipelines of diffusers; a clip of which the beginning
        is given is the row's demonstration, or `metadata.given_from` is "start". How many frames a video gives is its
        row's `metadata.num_given_frames`; 1 if it does not say.

        Returns:
            float32 [3, F, h, w] in [-1, 1]; None where the row gives none.

        Raises:
            DataError: There are several, or they cannot be used.
        """
        number = self.num_given(prompt)
        if len(prompt.media) > 1:
            raise DataError(f"{len(prompt.media)} media in a row; a world model is given one image or video")
        if prompt.media:
            return self.read_pixels(prompt.media[0], number or 1, from_end=self._goes_on(prompt))
        if not number:
            return None
        if prompt.demonstration is None:
            raise DataError(f"metadata.{_NUM_GIVEN} is {number}, and the row has neither media nor a demonstration")
        return self.read_pixels(prompt.demonstration, number)

    def _goes_on(self, prompt: Prompt) -> bool:
        """Tell whether what is generated goes on where the row's video ends, and is not its own continuation."""
        default = "start" if prompt.media[0] == prompt.demonstration else "end"
        end = prompt.metadata.get(_GIVEN_FROM, default)
        if end not in ("start", "end"):
            raise DataError(f"metadata.{_GIVEN_FROM} is {end!r}; frames are given from the 'start' or the 'end'")
        return end == "end"

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
        location = prompt.metadata.get(METADATA)
        if location is not None:
            return file_embedding(str(location), self._family.options.text_length, self._family.text_width)
        return self._words(prompt.text)

    def _words(self, words: str) -> torch.Tensor:
        if self._family.options.text == "table":
            return table_embedding(words, self._family.options.text_length, self._family.text_width)
        return self._family.encode_words(words)

    def filled(self, text_LE: torch.Tensor) -> torch.Tensor:
        """An embedding with rows of zeros up to `text_length`."""
        length = self._family.options.text_length
        if len(text_LE) > length:
            raise DataError(f"a text of {len(text_LE)} tokens, and model.options.text_length is {length}")
        return nn.functional.pad(text_LE, (0, 0, 0, length - len(text_LE)))

    def negative_text(self) -> torch.Tensor:
        """float32 [L, E], what guidance leads away from."""
        if self._negative is None:
            location = self._family.options.negative_embedding
            if location is not None:
                found = file_embedding(location, self._family.options.text_length, self._family.text_width)
            else:
                words = self._family.options.negative_prompt
                if words is None:
                    # A table knows nothing of what encoders were told.
                    words = "" if self._family.options.text == "table" else self._family.default_negative_prompt
                with self._family.on_cpu():
                    found = self._words(words)
            self._negative = self.filled(found)
        return self._negative
