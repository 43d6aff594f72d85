"""A model that answers, a part at a time: short requests to its engine, each of which goes on where the last ended."""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import numpy as np

from cosmos_core.config.loading import run_of
from cosmos_core.config.schema import EngineConfig, ModelConfig
from cosmos_core.devices import num_threads
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.tokens import tokens_payload, values
from cosmos_core.protocols import FinishReason, Generated, Model, Request, Sampling
from cosmos_core.protocols.model import MultiTurnModel
from cosmos_core.protocols.vision import DialogueVision
from cosmos_core.rollout.endpoint.calls import Call
from cosmos_core.rollout.endpoint.turns import before_stop, read_reply, stop_in
from cosmos_core.rollout.episodes.recording import follow, refuse_unseen
from cosmos_core.types import JSON, Message, Payload, Prompt
from cosmos_service_tools.served import Served, check_folder, exported, is_of_tokens, model_config, serve

_FIRST: Final = 4
_LONGEST: Final = 32
"""Tokens of the first request of an answer, and most of a later one, which are a quarter of what is there."""
_MARKS: Final = ("<think>", "</think>")
"""What tells thoughts apart, which a tokenizer may have no tokens of."""
_UNFINISHED: Final = "\ufffd"
"""Stands at the end of text whose last character has tokens to come."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """Some more of an answer.

    Attributes:
        text: The text that is new.
        reasoning: What is new of what was thought, where that is told apart.
        ids: int32 [N], the tokens of the answer so far.
        logprobs: float32 [N].
        reason: `stop` or `length` with the last part; empty before.
    """

    text: str
    ids: np.ndarray
    logprobs: np.ndarray
    reason: str = ""
    reasoning: str = ""


Read: TypeAlias = Callable[[np.ndarray], Message]
"""Reads tokens, int32 [N], as a turn."""


class Speaker:
    """A model that is being served; any thread may ask it.

    Attributes:
        why_plain: Why a chat is not put in the model's template, but completed as plain text; empty where it is put.
    """

    def __init__(self, served: Served, *, why_plain: str = "") -> None:
        """Answer by a model."""
        self._served: Final = served
        self.why_plain: Final = why_plain
        self._numbers: Final = itertools.count()
        self._tokenizer: Final = threading.RLock()

    @property
    def context_length(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self._served.context_length

    def encode(self, prompt: Sequence[Message] | str, tools: Sequence[Mapping[str, JSON]] = ()) -> Payload:
        """Token ids of a chat, through the template, or of plain text; raises DataError if it has none.

        Where chats are completed as plain text, they have one turn of the user's.
        """
        model, text = self._served.model, prompt if isinstance(prompt, str) else tuple(prompt)
        if not isinstance(text, str):
            refuse_unseen(text, sees=not self.why_plain and isinstance(model, DialogueVision))
        if self.why_plain and not isinstance(text, str):
            if [turn.role for turn in text] != ["user"]:
                raise DataError(f"a chat is one turn of the user's here: it is completed as it is ({self.why_plain})")
            text = text[0].content
        with self._tokenizer:
            return model.encode(Prompt(text=text, tools=tuple(tools)))

    def read(self, call: Call, messages: Sequence[Message] | str, ids: np.ndarray) -> Message:
        """Read an answer as the reply to a call, after a chat or plain text."""
        model = self._served.model
        if self.why_plain or isinstance(messages, str) or not isinstance(model, MultiTurnModel):
            return self._plain(ids, call.stops)
        with self._tokenizer:
            return read_reply(model, self.decode, call, messages, ids).message

    def _plain(self, ids: np.ndarray, stops: Sequence[str]) -> Message:
        return Message(role="assistant", content=before_stop(self.decode(ids), stops))

    def decode(self, ids: np.ndarray) -> str:
        """The text of tokens."""
        with self._tokenizer:
            return self._served.model.decode(tokens_payload((), ids))

    def answer(
        self, prompt: Payload, sampling: Sampling, seed: int, stops: Sequence[str] = (), read: Read | None = None
    ) -> Iterator[Part]:
        """Go on from a prompt, part by part; what is begun ends with the iterator.

        Args:
            prompt: See `encode`.
            sampling: How to draw one completion, no longer than the context leaves room for.
            seed: Of the draws.
            stops: Texts before which the answer ends.
            read: Reads it, if it is no plain text.

        Raises:
            ConfigError: The prompt fills the model's context.
            EngineError: The engine failed.
        """
        most, read = min(sampling.max_units, self.room(prompt)), read or functools.partial(self._plain, stops=stops)
        ids, logprobs, told = np.empty(0, np.int32), np.empty(0, np.float32), Message(role="assistant", content="")
        for number in itertools.count():
            size = min(max(_FIRST, min(_LONGEST, len(ids) // 4)), most - len(ids))
            before = follow([prompt, *([tokens_payload(ids)] if len(ids) else [])], self._served.model)
            made = self._ask(before, attrs.evolve(sampling, max_units=size), _mixed(seed, number))
            new = values(made.payload, "completion")
            ids, logprobs = np.concatenate([ids, new]), np.concatenate([logprobs, values(made.payload, "logprobs")])
            reason = "stop" if made.reason is FinishReason.STOP else "length" if len(ids) >= most else ""
            if found := stop_in(self.decode, ids, len(new), stops):
                ids, logprobs, reason = ids[:found], logprobs[:found], "stop"
            said = read(ids)
            if not reason:
                # What may become a stop, a mark or another character is kept back.
                content, thought = _ripe(said.content, (*stops, *_MARKS)), _ripe(said.reasoning, _MARKS).rstrip()
                said = attrs.evolve(said, content=content, reasoning=thought)
            if reason or (said.content.startswith(told.content) and said.reasoning.startswith(told.reasoning)):
                text, thought = said.content[len(told.content) :], said.reasoning[len(told.reasoning) :]
                yield Part(text=text, reasoning=thought, ids=ids, logprobs=logprobs, reason=reason)
                told = said
            if reason:
                return

    def room(self, prompt: Payload) -> int:
        """Tokens that the context has left after a prompt; raises ConfigError if that is none."""
        room = self._served.room(prompt)
        if room is None or room < 1:
            size = prompt.arrays["prompt"].shape[0]
            raise ConfigError(f"{size} tokens fill the model's context of {self._served.context_length}; shorten them")
        return room

    def _ask(self, prompt: Payload, sampling: Sampling, seed: int) -> Generated:
        """Make a few tokens."""
        engine = self._served.engine
        request = Request(request_id=f"part-{next(self._numbers)}", prompt=prompt, sampling=sampling, seed=seed)
        (handle,) = engine.submit([request])
        try:
            (made,) = handle.result()
        except BaseException:
            engine.abort([request.request_id])
            raise
        return made


def _mixed(seed: int, number: int) -> int:
    """The seed of a part: draws of an engine depend on the place in a completion, and each part begins one."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7])


def _ripe(text: str, stops: Sequence[str]) -> str:
    text = text.rstrip(_UNFINISHED)
    longest = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - longest]


@contextmanager
def speaking(
    source: Path, *, plugin: str | None, trust_remote_code: bool, plain: bool | None = None
) -> Iterator[Speaker]:
    """Serve the model of a run's latest checkpoint, or an exported one, on the embedded engine.

    `plain` is whether it completes plain text, see `why_plain`.

    It computes on as many threads as OMP_NUM_THREADS says, else on one.

    Raises:
        ConfigError: There is no model, or none of texts.
    """
    with (
        model_folder(source, plugin=plugin, trust_remote_code=trust_remote_code) as (directory, config),
        serve(directory, config, EngineConfig(), threads=num_threads()) as served,
    ):
        why = why_plain(source, plain)
        if why and plain is None and _has_template(served.model):
            why += "; --template puts chats in the model's template"
        yield Speaker(served, why_plain=why)


@contextmanager
def model_folder(source: Path, *, plugin: str | None, trust_remote_code: bool) -> Iterator[tuple[Path, ModelConfig]]:
    """The folder of an exported model, made of a run's latest checkpoint if `source` is a run, and its options.

    Raises:
        ConfigError: There is no model, or none of texts.
    """
    check_folder(source)
    config = model_config(source, run_of(source), plugin, trust_remote_code=trust_remote_code)
    if not is_of_tokens("model", config.plugin):
        raise ConfigError(f"{source}: models of plugin {config.plugin!r} write no text; cosmos generate makes videos")
    with exported(source) as directory:
        yield directory, config


def why_plain(source: Path, plain: bool | None) -> str:
    """Say why to complete plain text instead of chats: it is asked for, or (None) the model's run learned from it."""
    if plain is None and (run := run_of(source)) is not None and run.is_plain:
        return f"run {run.recipe.run.name} learned from plain prompts"
    return "--plain" if plain else ""


def _has_template(model: Model) -> bool:
    try:
        model.encode(Prompt(text=(Message(role="user", content="?"),)))
    except DataError:
        return False
    return True


def name_of(source: Path) -> str:
    """The name of a model: its run's, or its folder's."""
    run = run_of(source)
    return source.resolve().name if run is None else run.recipe.run.name
