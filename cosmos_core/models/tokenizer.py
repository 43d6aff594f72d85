"""Token ids of prompts, demonstrations and observations: the tokenizer, the chat template, what ends a completion.

A tokenizer is loaded from a checkpoint, or a byte-level BPE trained on the dataset. The template writes chats, tools
and calls of them; how a model's own turn is read is told by `tool_formats`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import attrs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models import tool_formats
from cosmos_core.models.vision.images import refuse_unseen
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.loading import first_line
from cosmos_core.models.words import Joined, Words, strings, unsaid, with_strings
from cosmos_core.protocols import ModelContext
from cosmos_core.protocols.model import ReadTurn
from cosmos_core.types import JSON, Message, Prompt, ToolCall
from cosmos_core.types.tools import arguments_of, names_of, read_tools

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
    tool_format: tool_formats.FormatName = option(
        "auto",
        help="How the model writes calls of tools, and its reasoning: `auto` finds it in the tokenizer's own response "
        "template, the chat template, and the special tokens, in this order.",
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
    """Encodes what rows and environments say to a model, and decodes completions.

    Attributes:
        shown: In the place of `Words.joined`, for turns that show images; None refuses these.
    """

    shown: Joined | None = None

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self._takes: dict[tuple[str | None, str], bool] = {}
        self._forms: dict[str, type | None] = {}

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
        for name in ("tokenizer", "words", "takes_parts", "tool_format", "_opening"):
            self.__dict__.pop(name, None)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Plain text is the author's own, special tokens included. In a chat, only the template and the turns of the model
        have any: what the others say is words.
        """
        if isinstance(prompt.text, str):
            if prompt.tools:
                raise DataError("the prompt has tools and is plain text; tools are for chats")
            encoded = self.tokenizer(prompt.text, add_special_tokens=self.model.options.add_special_tokens)
            ids: list[int] = encoded["input_ids"]
        else:
            refuse_unseen(() if self.shown else prompt.text)
            # Placeholders of what is seen have been written into the words (see `vision.turns.refuse_spelt`).
            guarded, spelt = (prompt, {}) if prompt.media else self._guarded(prompt)
            ids = self._joined(self.chat_text(guarded), spelt)
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

    def turns_ids(self, prompt: Prompt, written: Sequence[int], turns: Sequence[Message]) -> list[int]:
        """Plain text as it is; in a chat, the rest of the model's turn and what others say next, by the template.

        Whatever others say, it is words. A role that the template does not take is the user's.
        """
        if not turns or any(turn.role == "assistant" for turn in turns):
            raise DataError("what follows the model's turn are turns of others, one at least; nobody speaks for it")
        refuse_unseen(() if self.shown else turns)
        if isinstance(prompt.text, str):
            (guarded,), spelt = self.words.guarded(["".join(turn.content for turn in turns)])
            return self._joined(guarded, spelt)
        calls = self.read_turn(prompt, written).message.tool_calls if turns[0].role == "tool" else ()
        # Reasoning of earlier turns, which not every template takes beside calls, changes nothing of what follows.
        before = tuple(attrs.evolve(turn, reasoning="") for turn in prompt.text)
        first = next((index for index, turn in enumerate(before) if turn.role == "assistant"), 0)
        # Nor do most of these turns: in one the model may have called more tools at once than the template can write.
        for shown in (before, before[:first]) if first else (before,):
            told = attrs.evolve(prompt, text=shown, media=())
            try:
                found = self._after_calls(told, written, calls, turns) if calls else None
                return self._after_words(told, written, turns) if found is None else found
            except DataError as error:
                refused = error
        raise refused

    def _joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        return (self.shown or self.words.joined)(text, spelt)

    def _after_words(self, prompt: Prompt, written: Sequence[int], turns: Sequence[Message]) -> list[int]:
        """The ids that follow a turn of the model, in whose place a mark stands."""
        mark, template = _mark(prompt, turns), self.template_for(has_tools=bool(prompt.tools))
        taken = [attrs.evolve(turn, role=self._role(turn.role, template)) for turn in turns]
        own = (*prompt.text, Message(role="assistant", content=mark))
        guarded, spelt = self._guarded(attrs.evolve(prompt, text=(*own, *taken)))
        _, found, rest = self.chat_text(guarded).rpartition(mark)
        if not found:
            raise DataError("the chat template leaves out the model's turn before the user's; it cannot go on")
        ids = self._joined(rest, spelt)
        if not ids or not written or not self._ends_twice(attrs.evolve(prompt, text=own), mark, written[-1], ids):
            return ids
        return ids[1:]

    def _ends_twice(self, own: Prompt, mark: str, end: int, ids: Sequence[int]) -> bool:
        """Tell whether the first of the ids ends the turn that the model itself has ended, with `end`.

        That may be another of its stop tokens, or one that the template writes only behind the last turn of all, and
        another behind earlier ones.
        """
        stops, steering = self.words.stops, self.words.steering
        if ids[0] == end or {ids[0], end} <= stops:
            return True
        if end not in stops or not steering.issuperset(ids[:2]):
            return False
        last = self.written(self.chat_turns(own), is_open=False).rpartition(mark)[2]
        return self.words.joined(last, {})[:1] == [end]

    def _after_calls(
        self, prompt: Prompt, written: Sequence[int], calls: Sequence[ToolCall], turns: Sequence[Message]
    ) -> list[int] | None:
        """The ids that follow a turn of the model that calls tools; None if the template does not tell them.

        It writes calls by these names, whose arguments are the mark, and ends the turn with a stop token: there the
        model's own turn ended.
        """
        mark, asked = _mark(prompt, turns), (turns[0], attrs.evolve(turns[0], content=PROBE))
        marked = tuple(attrs.evolve(call, arguments=json.dumps({"value": mark})) for call in calls)
        before = (*prompt.text, Message(role="assistant", content="", tool_calls=marked))
        try:
            guarded = [self._guarded(attrs.evolve(prompt, text=(*before, turn, *turns[1:]))) for turn in asked]
            (rest, head) = (self.chat_text(text).rpartition(mark)[2] for text, _ in guarded)
        except DataError:
            return None
        head, is_written, _ = head.partition(PROBE)
        ends = self.words.stop_in(head)
        if not is_written or ends is None or not rest.startswith(head):
            return None
        has_ended = bool(written) and written[-1] in self.words.stops
        return self._joined(rest[ends.end() if has_ended else ends.start() :], guarded[0][1])

    def read_turn(self, prompt: Prompt, ids: Sequence[int]) -> ReadTurn:
        """Read a turn of the model by the format of its calls, and of its reasoning."""
        if isinstance(prompt.text, str):
            text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
            return ReadTurn(message=Message(role="assistant", content=text))
        ended = bool(ids) and ids[-1] in self.words.stops
        text = str(self.tokenizer.decode(list(ids[:-1] if ended else ids)))
        own = self._own_format if prompt.tools else None
        if own is not None:
            parsed = tool_formats.parse_by_template(self.tokenizer, own, text, prompt.tools, self._opening)
        else:
            parsed = tool_formats.parse(
                self.tool_format,
                text,
                tools=prompt.tools,
                ended=ended,
                is_thinking=self._opening.rstrip().endswith(tool_formats.THINK),
            )
        content = parsed.content if parsed.malformed else self.words.without_steering(parsed.content)
        message = Message(role="assistant", content=content, tool_calls=parsed.calls, reasoning=parsed.reasoning)
        return ReadTurn(message=message, malformed=parsed.malformed)

    @cached_property
    def tool_format(self) -> str:
        """The name of the format in which the model calls tools: the recipe's, else that of the template and tokens."""
        given = self.model.options.tool_format
        if given != "auto":
            return given
        return tool_formats.find_format(self.template_for(has_tools=True) or "", self.tokenizer.get_vocab())

    @property
    def _own_format(self) -> Mapping[str, Any] | None:
        """The tokenizer's own declaration of how turns are read, unless the recipe names a format."""
        own = getattr(self.tokenizer, "response_template", None)
        return own if self.model.options.tool_format == "auto" else None

    @cached_property
    def _opening(self) -> str:
        """A turn of the model as the template begins it, and what is before it."""
        return self.written(self.chat_turns(Prompt(text=(Message(role="user", content=PROBE),))))

    def _guarded(self, prompt: Prompt) -> tuple[Prompt, Mapping[str, str]]:
        """A chat in which marks stand for steering tokens that others than the model spell, and what they stand for."""
        assert not isinstance(prompt.text, str)
        for turn in prompt.text:
            if token := self.words.spells(turn.role):
                raise DataError(f"the role {turn.role!r:.80} of a turn spells the token {token!r}; name another role")
        others = [turn for turn in prompt.text if turn.role != "assistant"]
        said = [text for turn in others for text in (turn.content, turn.tool_call_id)]
        texts, spelt = self.words.guarded([*said, *strings(prompt.tools)])
        following = iter(texts)
        turns = tuple(
            turn
            if turn.role == "assistant"
            else attrs.evolve(turn, content=next(following), tool_call_id=next(following))
            for turn in prompt.text
        )
        return attrs.evolve(prompt, text=turns, tools=with_strings(prompt.tools, following)), spelt

    def _role(self, role: str, template: str | None) -> str:
        """The role of a turn, or `user` where the template does not write what another says."""
        if role == "user":
            return role
        key = (template, role)
        if key not in self._takes:
            said = (("user", "?"), ("assistant", "!"), (role, PROBE))
            turns = tuple(Message(role=who, content=what) for who, what in said)
            self._takes[key] = PROBE in self.written(self.chat_turns(Prompt(text=turns)), template=template)
            if not self._takes[key]:
                _LOG.warning("the chat template takes no turns of %r: observations of that role are the user's", role)
        return role if self._takes[key] else "user"

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats; of several by name, the default."""
        return default_template(self.tokenizer.chat_template)

    def template_for(self, *, has_tools: bool) -> str | None:
        """The template of chats, of several by name that for tools where there are any."""
        named = self.tokenizer.chat_template
        own = named.get("tool_use") if has_tools and isinstance(named, Mapping) else None
        return self.chat_template if own is None else own

    def chat_turns(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The turns of a chat, as the template takes them."""
        assert not isinstance(prompt.text, str)
        template = self.template_for(has_tools=bool(prompt.tools)) or ""
        thinks = next((key for key in tool_formats.REASONING_KEYS if re.search(rf"\b{key}\b", template)), None)
        names = {call.id: call.name for turn in prompt.text for call in turn.tool_calls if call.id}
        turns = []
        for turn in prompt.text:
            more = {
                "tool_calls": [self._call(call, template) for call in turn.tool_calls],
                "tool_call_id": turn.tool_call_id,
                "name": names.get(turn.tool_call_id) if turn.role == "tool" else None,
                **({thinks: turn.reasoning} if thinks else {}),
            }
            given = {key: value for key, value in more.items() if value}
            turns.append({"role": turn.role, "content": turn.content, **given})
        return turns

    def _call(self, call: ToolCall, template: str) -> dict[str, Any]:
        arguments = arguments_of(call)
        if template not in self._forms:
            self._forms[template] = self._form(template)
        form = self._forms[template]
        if form is None:
            raise DataError(f"a turn calls the tool {call.name!r}, and the chat template writes no calls of tools")
        function = {"name": call.name, "arguments": arguments if form is dict else call.arguments}
        return {"type": "function", **({"id": call.id} if call.id else {}), "function": function}

    def _form(self, template: str) -> type | None:
        """The type in which the template takes arguments of calls: an object or its text; None if it writes no calls.

        Some add arguments to a text, and some write an object as Python does.
        """
        value = {"value": PROBE}
        for arguments in (value, json.dumps(value)):
            call = {"type": "function", "id": "aToolCall", "function": {"name": "a_tool", "arguments": arguments}}
            said: list[dict[str, Any]] = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            text = self.written(said, template=template)
            if PROBE in text and f"'{PROBE}'" not in text:
                return type(arguments)
        return None

    def chat_text(self, prompt: Prompt, *, is_open: bool = True) -> str:
        """A chat as text, special tokens in it, up to where the model answers (`is_open`).

        Raises:
            DataError: There is no template, or it does not take the turns, or the tools.
        """
        template = self.template_for(has_tools=bool(prompt.tools))
        if template is None:
            raise DataError(
                "the prompt is a chat, and the tokenizer has no chat template; "
                "set model.options.chat_template or use plain text prompts"
            )
        tools, turns = read_tools(prompt.tools), self.chat_turns(prompt)
        try:
            text = self.render(turns, tools, template=template, is_open=is_open)
        except loading.TEMPLATE_ERRORS as error:
            raise DataError(f"the chat template fails on this prompt: {loading.first_line(error)}") from error
        if tools and (template, "tools") not in self._takes:
            if self.written(turns, template=template) == text or any(name not in text for name in names_of(tools)):
                raise DataError(
                    f"the prompt has {len(tools)} tools, and the chat template does not write them; set "
                    "model.options.chat_template to one that takes tools"
                )
            self._takes[template, "tools"] = True
            if self.model.options.tool_format == "auto" and self._own_format is None and self.tool_format == "none":
                _LOG.warning(
                    "the format in which the model calls tools is not known; name it: model.options.tool_format"
                )
        return text

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, JSON]] = (),
        *,
        template: str | None = None,
        is_open: bool = True,
    ) -> str:
        """Turns as the template writes them; it may raise any of `loading.TEMPLATE_ERRORS`."""
        text: str = self.tokenizer.apply_chat_template(
            list(turns),
            tools=[dict(tool) for tool in tools] or None,
            chat_template=template or self.chat_template,
            tokenize=False,
            add_generation_prompt=is_open,
            **self.model.options.chat_template_options,
        )
        return text

    def written(self, turns: Sequence[Mapping[str, Any]], *, template: str | None = None, is_open: bool = True) -> str:
        """Turns as the template writes them; empty if it does not take them."""
        try:
            return self.render(turns, template=template, is_open=is_open)
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


def _mark(prompt: Prompt, turns: Sequence[Message]) -> str:
    """A text that stands for the model's turn, and that nobody else says."""
    others = [turn.content for turn in (*prompt.text, *turns) if isinstance(turn, Message)]
    return unsaid(_ANSWER, [*others, *strings(prompt.tools)])
