"""Token ids of prompts, demonstrations and observations: the tokenizer, the chat template, what ends a completion.

A tokenizer is loaded from a checkpoint, or a byte-level BPE trained on the dataset. What an environment answers, and
what a row's user says, may spell `<|im_end|>` or the placeholder of an image. Only the chat template writes such
tokens. In words they are text, encoded as any other (`Words`).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import attrs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.vision.images import MARK
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.loading import first_line
from cosmos_core.protocols import ModelContext
from cosmos_core.types import JSON, Message, Prompt

PAD: Final = "<pad>"
BOS: Final = "<bos>"
EOS: Final = "<eos>"
FILE: Final = "tokenizer.json"
_INSTEAD: Final = "copy a tokenizer's files there, or name another checkpoint; a recipe's [model.tokenizer] makes one"


def build_tokenizer(corpus: Iterable[str], settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Train what `[model.tokenizer]` asks for, a byte-level BPE: any text can be encoded, and decodes to itself.

    The vocabulary includes the 256 bytes and three special tokens; split digits stay tokens of their own.
    """
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if settings["split_digits"] else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings["vocab_size"],
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    # Bytes are never unknown, but transformers may read an export with the class of the model's family, and that adds
    # an unknown token of its own, with an id beyond the vocabulary, where none is named.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=EOS
    )


def tokenizer_defaults(made: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Values of a config that depend on the tokenizer."""
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {"vocab_size": len(made), **{name: getattr(made, name) for name in special}}


def load_tokenizer(assets: Path, path: str | None, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that was made for the run if there is one, else the checkpoint's.

    Raises:
        ConfigError: The checkpoint's is code of its own, which is not trusted.
        DataError: There is none, or it cannot be read.
    """
    try:
        if (assets / FILE).is_file():
            made: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(assets)
            return made
        if path is None:
            raise DataError(
                "model: no tokenizer; add [model.tokenizer] to make one from the dataset, or give model.path"
            )
        if not trust_remote_code:
            _refuse_code(path)
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        where = assets if (assets / FILE).is_file() else path
        # Of this one, transformers lists in many lines what it would take.
        why = "it has no tokenizer.json" if "backend tokenizer" in str(error) else first_line(error)
        raise DataError(f"model: no usable tokenizer at {where}: {why}; {_INSTEAD}") from error
    if loaded.vocab_size <= 1:
        # It knows no text: what transformers makes of a folder without a tokenizer's files.
        raise DataError(f"model: no tokenizer at {path}; {_INSTEAD}")
    return loaded


def default_template(named: str | Mapping[str, str] | None) -> str | None:
    """The template of chats of a tokenizer or processor, which may have several by name."""
    return named if named is None or isinstance(named, str) else named.get("default")


def _refuse_code(path: str) -> None:
    """Refuse a tokenizer that only code in the checkpoint can make: transformers would make another of its files."""
    said: Mapping[str, Any] = get_tokenizer_config(path)
    name = str(said.get("tokenizer_class") or "")
    if "AutoTokenizer" in (said.get("auto_map") or {}) and tokenizer_class_from_name(name) is None:
        raise ConfigError(
            f"model.trust_remote_code: false, but the tokenizer of {path!r} ({name or 'without a class'}) is code in "
            "the checkpoint; read that code, and set model.trust_remote_code = true to let it run"
        )


class Words:
    """Encodes words beside what a template writes.

    Of the tokens in `stops`, which end a completion, those of the ordinary vocabulary, such as the end of a line, are
    words all the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> None:
        self.tokenizer: Final = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {id_ for id_, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # What no token spells becomes the unknown token; that steers nothing, unless it ends completions, too.
        special -= {tokenizer.unk_token_id} - set(stops)
        self._steering: Final = frozenset(filter(self._is_apart, special)) | (added.keys() & set(stops) - special)
        texts = {token for id_ in self._steering if isinstance(token := tokenizer.convert_ids_to_tokens(id_), str)}
        longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        self._pattern: Final = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # An episode's turns come again with each of its observations.
        self._checked: Final = functools.lru_cache(maxsize=256)(self._check)

    def spells(self, text: str) -> str:
        """The first steering token that a text spells; empty if it spells none."""
        found = self._pattern.search(text)
        return found.group() if found else ""

    def ids(self, text: str) -> list[int]:
        """Words alone."""
        if not self.spells(text):
            return list(self._checked(text))
        (guarded,), spelt = self.guarded([text])
        return self.joined(guarded, spelt)

    def guarded(self, texts: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
        """Words that a template can write as they are, and whose ids `joined` makes.

        Marks stand in them for what spells steering tokens; the second says what each mark stands for. A DataError says
        that the tokenizer makes a steering token of what spells none, as one that normalises may.
        """
        for text in texts:
            for piece in self._pattern.split(text):
                self._checked(piece)
        found = sorted({spelt for text in texts for spelt in self._pattern.findall(text)})
        base = "%spelt"
        while any(base in text for text in texts):
            base += "%spelt"
        marks = {spelt: f"{base}-{index}%" for index, spelt in enumerate(found)}
        put = [self._pattern.sub(lambda match: marks[match.group()], text) for text in texts]
        return put, {mark: spelt for spelt, mark in marks.items()}

    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """Text that a template wrote of guarded words: between marks as it is, and what these stand for as words.

        Raises:
            DataError: What a mark stands for cannot be encoded as words.
        """
        if not spelt:
            return self._encoded(text)
        pieces = re.split("(" + "|".join(map(re.escape, spelt)) + ")", text)
        return [
            id_ for piece in pieces for id_ in (self._spelt(spelt[piece]) if piece in spelt else self._encoded(piece))
        ]

    def _is_apart(self, special: int) -> bool:
        """Tell whether its text, as words, is encoded otherwise; a special token may be an ordinary one, too."""
        text = self.tokenizer.convert_ids_to_tokens(special)
        return isinstance(text, str) and special not in self._encoded(text, split_special_tokens=True)

    def _encoded(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _spelt(self, token: str) -> list[int]:
        """The text of a steering token; sign by sign where the tokenizer knows it as no special one."""
        ids = self._encoded(token, split_special_tokens=True)
        if self._steering.isdisjoint(ids):
            return ids
        return [id_ for sign in token for id_ in self._checked(sign)]

    def _check(self, text: str) -> list[int]:
        ids = self._encoded(text)
        if steering := self._steering.intersection(ids):
            token = self.tokenizer.convert_ids_to_tokens(min(steering))
            raise DataError(
                f"the words {text!r:.80} hold what the tokenizer takes for the token {token!r}, which only a chat "
                "template may write; leave it out of what the environment answers, or of the row"
            )
        return ids


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


class TextModel(Protocol):
    """The parts of a `HuggingFaceModel` that its texts depend on."""

    context: ModelContext
    turn_end: ClassVar[str | None]
    stop_tokens: ClassVar[tuple[str, ...]]

    @property
    def options(self) -> HuggingFaceOptions:
        """Options of the tokenizer and of chats."""

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer from its files."""


class TextEncoder:
    """Encodes what rows and environments say to a model, and decodes completions."""

    def __init__(self, model: TextModel) -> None:
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
            self._takes[key] = PROBE in self.written(self.chat_turns(Prompt(text=turns)))
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

    def written(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Turns as the template writes them; empty if it does not take them."""
        try:
            return self.render(turns)
        except loading.TEMPLATE_ERRORS:
            return ""

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
