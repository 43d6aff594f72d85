"""Rows of a dataset as what conditions the denoising: captions become embeddings, media given frames, videos samples.

Shape legend: C channels, T latent frames, H and W latent height and width, L tokens of the text, E their width,
F frames of a video.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.arrays import has, payload_of, tensor_of, with_tensors
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.diffusion.media import Limits, pixels_of, read_film
from cosmos_core.models.diffusion.noising import generator_of
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.vision.images import shown
from cosmos_core.protocols import Canvas, ModelContext
from cosmos_core.types import Payload, Prompt

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


class RowEncoding(Family):
    """How a family writes prompts and demonstrations."""

    def __init__(self, options: DiffusionOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self._negative: torch.Tensor | None = None

    def encode(self, prompt: Prompt) -> Payload:
        """The embedding of the caption, and what the family adds.

        Raises:
            DataError: The prompt cannot be encoded.
        """
        return payload_of({TEXT: self._embedding(prompt), **self.condition(prompt)})

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The conditioning, and the demonstrated video as latents in `sample`; frames that are given are as given.

        Raises:
            DataError: The prompt has no demonstration, or it cannot be read, is too short, or is larger than a limit.
        """
        if prompt.demonstration is None:
            raise DataError("the row has no demonstration: the location of a video to imitate")
        payload = self.encode(prompt)
        sample = self.codec.encode(self.read_pixels(prompt.demonstration, self.options.num_frames))
        if has(payload, GIVEN):
            canvas = self.canvas(payload)
            assert canvas.given is not None
            assert canvas.is_given_T is not None
            sample = torch.where(canvas.is_given_T[None, :, None, None], canvas.given, sample)
        return with_tensors(payload, {"sample": sample})

    def vet(self, prompt: Prompt) -> None:
        """Read a row's demonstration as training does, but do not encode it (see `protocols.Vetting`).

        Raises:
            DataError: It cannot be read, is too short, or is larger than a limit.
        """
        if prompt.demonstration is not None:
            self.read_pixels(prompt.demonstration, self.options.num_frames)

    def decode(self, payload: Payload) -> str:  # noqa: ARG002 - of the protocol
        """Empty: a world model writes nothing."""
        return ""

    def condition(self, prompt: Prompt) -> Mapping[str, torch.Tensor]:
        """Arrays of the payload that condition besides the text, such as `given` and `is_given`.

        Raises:
            DataError: The row names media that the family has no use for, or that cannot be used.
        """
        if prompt.media or self._num_given(prompt):
            raise DataError("the model takes no images or videos, and the row gives some; take one that does")
        return {}

    def conditioning(self, payload: Payload) -> Mapping[str, torch.Tensor]:
        """What conditions a forward, as tensors of one shape for all payloads: `text`, filled up, and the family's.

        Raises:
            DataError: The arrays of the payload do not fit the model.
        """
        return {TEXT: self._filled(tensor_of(payload, TEXT, torch.float32, (None, self.text_width)))}

    def blank(self) -> Payload:
        """A payload that `conditioning` takes, of zeros; families that condition on more than the text add to it."""
        return payload_of({TEXT: torch.zeros(1, self.text_width)})

    def canvas(self, prompt: Payload) -> Canvas:
        """What to denoise.

        Raises:
            DataError: The arrays of the payload do not fit the model.
        """
        shape = self.shape
        if not has(prompt, GIVEN):
            return Canvas(shape=shape)
        is_given_T = tensor_of(prompt, IS_GIVEN, torch.bool, (shape[1],))
        if bool(is_given_T.all()):
            raise DataError(f"all {shape[1]} latent frames are given, so that nothing is left to generate")
        return Canvas(shape=shape, given=tensor_of(prompt, GIVEN, torch.float32, shape), is_given_T=is_given_T)

    def read_pixels(self, location: str, num_frames: int, *, from_end: bool = False) -> torch.Tensor:
        """float32 [3, F, h, w] in [-1, 1]: the first or last frames of a video, of the size that is generated.

        Args:
            location: Of an image or a video.
            num_frames: How many.
            from_end: Whether the last ones.

        Raises:
            DataError: It cannot be read, is too short, or is larger than a limit.
        """
        options = self.options
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
        number = self._num_given(prompt)
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
        """Whether what is generated goes on where the row's video ends, and is not its own continuation."""
        default = "start" if prompt.media[0] == prompt.demonstration else "end"
        end = prompt.metadata.get(_GIVEN_FROM, default)
        if end not in ("start", "end"):
            raise DataError(f"metadata.{_GIVEN_FROM} is {end!r}; frames are given from the 'start' or the 'end'")
        return end == "end"

    def _num_given(self, prompt: Prompt) -> int:
        number = prompt.metadata.get(_NUM_GIVEN, 0)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < self.options.num_frames:
            raise DataError(
                f"metadata.{_NUM_GIVEN} is {number!r}; it is a number of frames below the {self.options.num_frames} "
                "of a video"
            )
        temporal = self.codec.temporal
        if number and (number - 1) % temporal:
            raise DataError(f"metadata.{_NUM_GIVEN} is {number}; the autoencoder takes 1 + a multiple of {temporal}")
        return number

    def _embedding(self, prompt: Prompt) -> torch.Tensor:
        if not isinstance(prompt.text, str):
            raise DataError("the row's text is a chat, and a world model takes a caption: plain text")
        location = prompt.metadata.get(METADATA)
        if location is not None:
            return file_embedding(str(location), self.options.text_length, self.text_width)
        return self._words(prompt.text)

    def _words(self, words: str) -> torch.Tensor:
        if self.options.text == "table":
            return table_embedding(words, self.options.text_length, self.text_width)
        return self.encode_words(words)

    def _encoded_aside(self, words: str) -> torch.Tensor:
        """On the CPU: a policy that learns from rollouts encodes nothing else, and needs no encoder on its device."""
        self._here.is_aside = True
        try:
            return self._words(words)
        finally:
            self._here.is_aside = False

    def _filled(self, text_LE: torch.Tensor) -> torch.Tensor:
        length = self.options.text_length
        if len(text_LE) > length:
            raise DataError(f"a text of {len(text_LE)} tokens, and model.options.text_length is {length}")
        return nn.functional.pad(text_LE, (0, 0, 0, length - len(text_LE)))

    def negative_text(self) -> torch.Tensor:
        """float32 [L, E], what guidance leads away from.

        Raises:
            DataError: It cannot be encoded.
        """
        if self._negative is None:
            location = self.options.negative_embedding
            if location is not None:
                found = file_embedding(location, self.options.text_length, self.text_width)
            else:
                words = self.options.negative_prompt
                if words is None:
                    # A table knows nothing of what encoders were told.
                    words = "" if self.options.text == "table" else self.default_negative_prompt
                found = self._encoded_aside(words)
            self._negative = self._filled(found)
        return self._negative
