"""Token ids of prompts, demonstrations and observations: the tokenizer, the chat template, what ends a completion."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from transformers import GenerationConfig, PreTrainedTokenizerBase

from cosmos_core.config import option
from cosmos_core.errors import DataError
from cosmos_core.models.tokenizer import FILE as TOKENIZER_FILE
from cosmos_core.models.tokenizer import Words, default_template, load_tokenizer
from cosmos_core.models.vision.prompts import MARK
from cosmos_core.models.weights import loading
from cosmos_core.types import JSON, Message, Prompt

if TYPE_CHECKING:
    from cosmos_core.models.huggingface import HuggingFaceModel

_LOG: Final = logging.getLogger(__name__)
GENERATION_FILE = "generation_config.json"
_ANSWER: Final = "%answer%"
"""Stands for the model's own turn where the template is asked what follows one."""
PROBE: Final = "a-turn"
"""Stands for what a turn says where the template is asked whether it writes that."""


@attrs.frozen(kw_only=True)
class HuggingFaceOptions:
    """Options of the tokenizer and of chats."""

    add_special_tokens: bool = option(
        True, help="Whether the tokenizer adds its special tokens (a beginning-of-text token) to plain text prompts."
    )
    chat_template: str | None = option(None, help="A Jinja chat template to use instead of the tokenizer's.")
    chat_template_options: Mapping[str, JSON] = option(
        factory=dict, help="Extra variables of the chat template, such as `enable_thinking = false`."
    )


class TextEncoder:
    """Encodes what rows and environments say to a model, and decodes completions."""

    def __init__(self, model: HuggingFaceModel) -> None:
        self.model = model
        self._takes: dict[tuple[str | None, str], bool] = {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self.model.load_tokenizer()

    @cached_property
    def words(self) -> Words:
        """Encodes the words of users and environments."""
        return Words(self.tokenizer, self.stop_ids())

    def forget(self) -> None:
        """Load the tokenizer, and look at its template, anew when they are needed next."""
        for name in ("tokenizer", "words", "takes_parts"):
            self.__dict__.pop(name, None)

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer from its files, with the chat template of the recipe, else its own, else the family's.

        Raises:
            DataError: There is none, or it cannot be read.
        """
        context, options = self.model.context, self.model.options
        tokenizer = load_tokenizer(context.assets, context.path, trust_remote_code=context.trust_remote_code)
        if options.chat_template is not None:
            tokenizer.chat_template = options.chat_template
        elif tokenizer.chat_template is None and (
            (context.assets / TOKENIZER_FILE).is_file() or self.model.turn_end in tokenizer.get_vocab()
        ):
            tokenizer.chat_template = self.model.turn_template
        return tokenizer

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Plain text is the author's own, special tokens included. In a chat, only the template and the turns of the model
        have any: what the others say is words.
        """
        if isinstance(prompt.text, str):
            encoded = self.tokenizer(prompt.text, add_special_tokens=self.model.options.add_special_tokens)
            ids: list[int] = encoded["input_ids"]
        else:
            # Placeholders of what is seen have been written into the words (see `refuse_spelt`).
            guarded, spelt = (prompt, {}) if prompt.media else self._guarded(prompt)
            ids = self.words.joined(self.chat_text(guarded), spelt)
        if not ids:
            raise DataError(f"the prompt {prompt.text!r} encodes to no tokens")
        return ids

    def demonstration_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt's demonstration, and what ends it."""
        if prompt.demonstration is None:
            raise DataError("the row has no demonstration, and the algorithm learns from demonstrations")
        ids = self.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
        end_id = None if isinstance(prompt.text, str) else self.tokenizer.get_vocab().get(self.model.turn_end or "")
        return [*ids, self.stop_id() if end_id is None else end_id]

    def observation_ids(self, prompt: Prompt, written: Sequence[int], observation: str, role: str) -> list[int]:
        """Plain text as it is; in a chat, the rest of the model's turn and a turn of `role`, by the template.

        Whatever the observation spells, it is words. A role that the template does not take is the user's.
        """
        if isinstance(prompt.text, str):
            return self.words.ids(observation)
        mark = _ANSWER
        while mark in observation:
            mark += _ANSWER
        answer = Message(role=self._role(role), content=observation)
        turns = (*prompt.text, Message(role="assistant", content=mark), answer)
        guarded, spelt = self._guarded(attrs.evolve(prompt, text=turns))
        _, found, rest = self.chat_text(guarded).rpartition(mark)
        if not found:
            raise DataError("the chat template leaves out the model's turn before the user's; it cannot go on")
        ids = self.words.joined(rest, spelt)
        # The model has ended its turn itself, perhaps with another of its stop tokens.
        ends_twice = bool(ids and written) and (ids[0] == written[-1] or {ids[0], written[-1]} <= self.stop_ids())
        return ids[1:] if ends_twice else ids

    def refuse_spelt(self, prompt: Prompt) -> None:
        """Refuse a chat with images or videos in which others than the model spell steering tokens.

        Their placeholders are written into the words, and could not be told from what these spell.
        """
        for turn in () if isinstance(prompt.text, str) else prompt.text:
            token = "" if turn.role == "assistant" else self.words.spells(MARK.sub("", turn.content))
            if token:
                raise DataError(
                    f"the words {turn.content!r:.80} spell the token {token!r}, which beside images or videos "
                    "cannot be told from those of the model; leave it out of the row"
                )

    def _guarded(self, prompt: Prompt) -> tuple[Prompt, Mapping[str, str]]:
        """A chat in which marks stand for steering tokens that others than the model spell, and what they stand for."""
        assert not isinstance(prompt.text, str)
        for turn in prompt.text:
            if token := self.words.spells(turn.role):
                raise DataError(f"the role {turn.role!r:.80} of a turn spells the token {token!r}; name another role")
        texts, spelt = self.words.guarded([turn.content for turn in prompt.text if turn.role != "assistant"])
        following = iter(texts)
        turns = (t if t.role == "assistant" else attrs.evolve(t, content=next(following)) for t in prompt.text)
        return attrs.evolve(prompt, text=tuple(turns)), spelt

    def _role(self, role: str) -> str:
        """The role of an observation, or `user` where the template does not write what another says."""
        if role == "user":
            return role
        key = (self.chat_template, role)
        if key not in self._takes:
            said = (("user", "?"), ("assistant", "!"), (role, PROBE))
            turns = tuple(Message(role=who, content=what) for who, what in said)
            self._takes[key] = self.is_written(self.chat_turns(Prompt(text=turns)))
            if not self._takes[key]:
                _LOG.warning("the chat template takes no turns of %r: observations of that role are the user's", role)
        return role if self._takes[key] else "user"

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats; of several by name, the default."""
        return default_template(self.tokenizer.chat_template)

    def chat_turns(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The turns of a chat, as the template takes them."""
        assert not isinstance(prompt.text, str)
        return [{"role": turn.role, "content": turn.content} for turn in prompt.text]

    def chat_text(self, prompt: Prompt) -> str:
        """A chat as text, special tokens in it.

        Raises:
            DataError: There is no template, or it does not take the turns.
        """
        if self.chat_template is None:
            raise DataError(
                "the prompt is a chat, and the tokenizer has no chat template; "
                "set model.options.chat_template or use plain text prompts"
            )
        try:
            return self.render(self.chat_turns(prompt))
        except loading.TEMPLATE_ERRORS as error:
            raise DataError(f"the chat template fails on this prompt: {loading.first_line(error)}") from error

    def render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Turns as the template writes them; it may raise any of `loading.TEMPLATE_ERRORS`."""
        text: str = self.tokenizer.apply_chat_template(
            list(turns),
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=True,
            **self.model.options.chat_template_options,
        )
        return text

    def is_written(self, turns: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether the template takes turns, and writes what the last one says: `PROBE`, in no list as it is."""
        try:
            written = self.render(turns)
        except loading.TEMPLATE_ERRORS:
            return False
        return PROBE in written and "'type'" not in written

    def stop_id(self) -> int:
        """The token that ends a text."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("the tokenizer has no end-of-text token, so nothing can end a completion")
        return int(eos)

    def stop_ids(self) -> frozenset[int]:
        """The tokenizer's end token, the family's, and those of a checkpoint's generation config."""
        vocabulary = self.tokenizer.get_vocab()
        stops = {self.stop_id(), *(vocabulary[token] for token in self.model.stop_tokens if token in vocabulary)}
        path = self.model.context.path
        if path is not None and (Path(path) / GENERATION_FILE).is_file():
            listed = GenerationConfig.from_pretrained(path).eos_token_id
            stops.update([listed] if isinstance(listed, int) else listed or ())
        return frozenset(stops)
