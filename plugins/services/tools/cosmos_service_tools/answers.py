"""A model that answers, a part at a time: short requests to its engine, each of which goes on where the last ended."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from cosmos_core.config.loading import run_of
from cosmos_core.config.schema import EngineConfig, ModelConfig
from cosmos_core.devices import num_threads
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import FinishReason, Model, Request, Sampling
from cosmos_core.types import Array, Message, Payload, Prompt
from cosmos_service_tools.served import Served, check_folder, exported, is_of_tokens, model_config, serve

_FIRST: Final = 4
_LONGEST: Final = 32
"""Tokens of the first request of an answer, and most of a later one, which are a quarter of what is there."""
_UNFINISHED: Final = "\ufffd"
"""Stands at the end of text whose last character has tokens to come."""


@attrs.frozen(kw_only=True)
class Part:
    """Some more of an answer.

    Attributes:
        text: The text that is new.
        num_units: Tokens of the answer so far.
        reason: `stop` or `length` with the last part; empty before.
    """

    text: str
    num_units: int
    reason: str = ""


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
        self._tokenizer: Final = threading.Lock()

    @property
    def context_length(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self._served.context_length

    def encode(self, prompt: Sequence[Message] | str) -> Payload:
        """Token ids of a chat, through the template, or of plain text; raises DataError if it has none.

        Where chats are completed as plain text, they have one turn of the user's.
        """
        text = prompt if isinstance(prompt, str) else tuple(prompt)
        if self.why_plain and not isinstance(text, str):
            if [turn.role for turn in text] != ["user"]:
                raise DataError(f"a chat is one turn of the user's here: it is completed as it is ({self.why_plain})")
            text = text[0].content
        with self._tokenizer:
            return self._served.model.encode(Prompt(text=text))

    def answer(self, prompt: Payload, sampling: Sampling, seed: int, stops: Sequence[str] = ()) -> Iterator[Part]:
        """Go on from a prompt, part by part; what is begun ends with the iterator.

        Args:
            prompt: See `encode`.
            sampling: How to draw one completion, no longer than the context leaves room for.
            seed: Of the draws.
            stops: Texts before which the answer ends.

        Raises:
            ConfigError: The prompt fills the model's context.
            EngineError: The engine failed.
        """
        most = min(sampling.max_units, self._room(prompt))
        ids, told = np.empty(0, np.int32), ""
        for number in itertools.count():
            size = min(max(_FIRST, min(_LONGEST, len(ids) // 4)), most - len(ids))
            done, more = self._ask(_longer(prompt, ids), attrs.evolve(sampling, max_units=size), _mixed(seed, number))
            ids = np.concatenate([ids, more])
            reason = "stop" if done is FinishReason.STOP else "length" if len(ids) >= most else ""
            text = self._decode(ids)
            if (found := min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)) >= 0:
                text, reason = text[:found], "stop"
            # What may become a stop, or another character, is kept back.
            ripe = text if reason else _ripe(text, stops)
            if reason or ripe.startswith(told):
                yield Part(text=ripe[len(told) :], num_units=len(ids), reason=reason)
                told = ripe
            if reason:
                return

    def _room(self, prompt: Payload) -> int:
        room = self._served.room(prompt)
        if room is None or room < 1:
            size = prompt.arrays["prompt"].shape[0]
            raise ConfigError(f"{size} tokens fill the model's context of {self._served.context_length}; shorten them")
        return room

    def _ask(self, prompt: Payload, sampling: Sampling, seed: int) -> tuple[FinishReason, np.ndarray]:
        """Make a few tokens: why they end, and the ids, int32 [N]."""
        engine = self._served.engine
        request = Request(request_id=f"part-{next(self._numbers)}", prompt=prompt, sampling=sampling, seed=seed)
        (handle,) = engine.submit([request])
        try:
            (made,) = handle.result()
        except BaseException:
            engine.abort([request.request_id])
            raise
        return made.reason, np.frombuffer(made.payload.arrays["completion"].data, np.int32)

    def _decode(self, ids: np.ndarray) -> str:
        with self._tokenizer:
            return self._served.model.decode(Payload(kind="tokens", arrays={"completion": _array(ids)}))


def _array(ids: np.ndarray) -> Array:
    return Array(dtype="int32", shape=ids.shape, data=ids.tobytes())


def _longer(prompt: Payload, ids: np.ndarray) -> Payload:
    """A prompt that ends with what was generated."""
    before = np.frombuffer(prompt.arrays["prompt"].data, np.int32)
    return attrs.evolve(prompt, arrays={**prompt.arrays, "prompt": _array(np.concatenate([before, ids]))})


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
