"""Dialogues with images in any turn: what a vision-language model makes of new turns, and of parts of a dialogue.

A turn is encoded beside what its images are to the model, and a dialogue is its parts, joined. Nothing that was said
before is encoded or looked at anew.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.errors import DataError
from cosmos_core.models.tokenizer import TextEncoder
from cosmos_core.models.tokens import KINDS, array_of, token_array, tokens_payload, values
from cosmos_core.models.vision.images import MARK, SEEN, in_turns, with_seen_marks
from cosmos_core.models.vision.model import VisionLanguageModel
from cosmos_core.types import Message, Payload, Prompt


class SeenImages(abc.ABC):
    """Images of turns, on their way into token ids.

    Attributes:
        number: Images that they are.
    """

    number: int

    @abc.abstractmethod
    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """See `Words.joined`; what a template wrote for images becomes their placeholders."""

    @abc.abstractmethod
    def payload(self, ids: Sequence[int]) -> Payload:
        """The ids as a prompt, with what its placeholders stand for."""

    def refuse_others(self, found: int) -> None:
        """Refuse a text with another number of images."""
        if found != self.number:
            raise DataError(
                f"the turns show {self.number} images, and the chat template writes {found} for them; show images in "
                "turns of a role whose contents it writes whole, such as `user`, or set model.options.chat_template"
            )


class DialogueVisionModel(VisionLanguageModel):
    """A vision-language model whose turns may show images (see `cosmos_core.protocols.vision.DialogueVision`)."""

    @abc.abstractmethod
    def look(self, media: Sequence[str]) -> SeenImages:
        """Read images; a DataError says that one cannot be read."""

    @abc.abstractmethod
    def marks(self, media: Sequence[str]) -> list[str]:
        """The mark of each of these in a row's text."""

    @abc.abstractmethod
    def kinds(self, payload: Payload) -> npt.NDArray[np.generic]:
        """The kind of each unit of a prompt that shows something."""

    @abc.abstractmethod
    def joined_media(self, payloads: Sequence[Payload]) -> Mapping[str, npt.NDArray[np.generic]]:
        """The arrays of what payloads show, as those of one."""

    def encode_shown(self, prompt: Prompt) -> Payload:
        """The prompt of a chat whose turns show images themselves."""
        whole = in_turns(prompt, self.marks(prompt.media))
        media = [location for turn in whole.text if isinstance(turn, Message) for location in turn.media]
        seen = self.look(media)
        return seen.payload(self._beside(seen).prompt_ids(_marked(whole)))

    def encode_seen_turns(self, prompt: Prompt, written: Sequence[int], turns: Sequence[Message]) -> Payload:
        """See `cosmos_core.protocols.vision.DialogueVision`."""
        seen = self.look([location for turn in turns for location in turn.media])
        return seen.payload(self._beside(seen).turns_ids(_marked(prompt), written, with_seen_marks(turns)))

    def _beside(self, seen: SeenImages) -> TextEncoder:
        text = copy.copy(self.text)
        text.shown = seen.joined
        return text

    def join(self, parts: Sequence[Payload]) -> Payload:
        """See `cosmos_core.protocols.vision.DialogueVision`."""
        shown = [part for part in parts if any(map(self.is_media, part.arrays))]
        ids = np.concatenate([values(part, "prompt") for part in parts])
        if not shown:
            return tokens_payload(ids.tolist())
        kinds = [
            self.kinds(part) if part in shown else np.zeros(len(values(part, "prompt")), np.int64) for part in parts
        ]
        media = {name: array_of(array) for name, array in self.joined_media(shown).items()}
        arrays = {"prompt": token_array(ids), KINDS: array_of(np.concatenate(kinds).astype(np.int64)), **media}
        return attrs.evolve(parts[0], arrays=arrays)


def _marked(prompt: Prompt) -> Prompt:
    return prompt if isinstance(prompt.text, str) else attrs.evolve(prompt, text=with_seen_marks(prompt.text))


def num_marks(text: str) -> int:
    """Images of turns in a text that a template wrote."""
    return text.count(SEEN)


def filled_marks(text: str, texts: Sequence[str]) -> str:
    """The text with each of the texts in the place of an image of turns, in order."""
    first, *others = text.split(SEEN)
    return first + "".join(own + rest for own, rest in zip(texts, others, strict=True))


def refuse_spelt(text: TextEncoder, prompt: Prompt) -> None:
    """Refuse a chat with images or videos of its row in which others than the model spell steering tokens.

    Their placeholders are written into the words, and could not be told from what these spell.
    """
    for turn in () if isinstance(prompt.text, str) else prompt.text:
        token = "" if turn.role == "assistant" else text.words.spells(MARK.sub("", turn.content))
        if token:
            raise DataError(
                f"the words {turn.content!r:.80} spell the token {token!r}, which beside images or videos cannot be "
                "told from those of the model; leave it out of the row"
            )
