"""Engines of tokens: checked prompts, sequences in flight, and the engine's base class."""

from __future__ import annotations

import abc

import attrs
import numpy as np
import torch

from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import FinishReason, Generated, Model, Request
from cosmos_core.protocols.vision import Conditioning, VisionModel
from cosmos_core.rollout.serving.engine import ServedEngine
from cosmos_core.rollout.serving.randomness import sample_key
from cosmos_core.rollout.serving.requests import RequestState, ServedHandle
from cosmos_core.types import Array, Payload
from cosmos_core.weights.shards import dtype_name


def check_request(request: Request, *, context_length: int, vocabulary: int) -> None:
    """Refuse what cannot be generated.

    Raises:
        EngineError: Names the request, the value seen and what is allowed.
    """
    where = f"request {request.request_id!r}"
    ids = check_ids(request.prompt, "prompt", where, vocabulary)
    if len(ids) == 0:
        raise EngineError(f"{where}: the prompt is empty; it needs one token at least")
    sampling = request.sampling
    if sampling.max_units < 1 or len(ids) + sampling.max_units > context_length:
        raise EngineError(
            f"{where}: a prompt of {len(ids)} and a completion of up to {sampling.max_units} units do not fit the "
            f"context length of {context_length}"
        )
    if sampling.num_samples < 1 or (sampling.temperature == 0 and sampling.num_samples != 1):
        raise EngineError(f"{where}: {sampling.num_samples} samples at temperature {sampling.temperature}")
    proper = sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0
    if not proper:
        raise EngineError(
            f"{where}: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k} are not a "
            "way to draw (temperature >= 0, 0 < top_p <= 1, top_k >= 0)"
        )


def check_ids(payload: Payload, name: str, where: str, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids of a payload, int32 [N], all below `vocabulary`; `where` is what the payload is of, for errors.

    Raises:
        EngineError: There is no such array of int32, or an id is outside the vocabulary.
    """
    array = payload.arrays.get(name)
    if payload.kind != "tokens" or array is None or array.dtype != "int32" or len(array.shape) != 1:
        found = "none" if array is None else f"{array.dtype} {list(array.shape)}"
        raise EngineError(
            f"{where}: this engine takes payloads of kind 'tokens' with an int32 {name!r} of one dim; the kind is "
            f"{payload.kind!r}, the array {found}"
        )
    ids = np.frombuffer(array.data, np.int32)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        raise EngineError(
            f"{where}: token ids {ids.min()} to {ids.max()} of its {name} do not fit a vocabulary of {vocabulary}"
        )
    return ids


def condition(prompt: Payload, model: Model, where: str) -> Conditioning | None:
    """Conditioning of a prompt; None where its token ids say it all."""
    if isinstance(model, VisionModel):
        try:
            return model.condition(prompt)
        except DataError as error:
            raise EngineError(f"{where}: {error}") from error
    if more := sorted(prompt.arrays.keys() - {"prompt"}):
        raise EngineError(
            f"{where}: its prompt has the arrays {', '.join(more)}, and {type(model).__name__} does not say how they "
            "enter a forward (cosmos_core.protocols.vision.VisionModel)"
        )
    return None


@attrs.define(eq=False)
class TokenSequence:
    """One sample of a request.

    Attributes:
        parent: Its request.
        index: Its place among the request's samples.
        tokens: Prompt, then what was generated.
        logprobs: Of each generated unit.
        spans: (first generated unit, weight version), ascending.
        slot: Its row of the cache; -1 while it waits or when it is finished.
        cached: Units in the cache, while it is in a slot but not decoding yet.
        prefix_load: Number of the load of weights under which the beginning of its cache was computed.
        origin: The sample whose computation of the prompt is in its slot; itself, or one that it was copied from.
        records: What forwards recorded, by name: for each unit, in order (see `records`).
        reason: Why it ended; None while it goes on.
    """

    parent: TokenRequestState
    index: int
    tokens: list[int]
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[tuple[int, int]] = attrs.field(factory=list)
    slot: int = -1
    cached: int = 0
    prefix_load: int = -1
    origin: TokenSequence | None = None
    records: dict[str, torch.Tensor] = attrs.field(factory=dict)
    reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        """Units generated so far."""
        return len(self.logprobs)

    @property
    def key(self) -> int:
        """Key of its random numbers."""
        return sample_key(self.parent.request.seed, self.index)

    def mark(self, version: int) -> None:
        """Record that the next units come from `version`."""
        if self.spans and self.spans[-1][0] == self.num_generated:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((self.num_generated, version))

    def generated(self, version: int) -> Generated:
        """The result, partial if it was aborted; `version` stands in where nothing was generated."""
        starts = [start for start, _ in self.spans if start < self.num_generated]
        versions = [spanned for _, spanned in self.spans[: len(starts)]]
        sizes = np.diff([*starts, self.num_generated])
        payload = Payload(
            kind="tokens",
            arrays={
                **self.parent.request.prompt.arrays,
                "completion": _array("int32", np.asarray(self.tokens[self.parent.num_prompt :], np.int32)),
                "logprobs": _array("float32", np.asarray(self.logprobs, np.float32)),
                "versions": _array("int32", np.repeat(np.asarray(versions, np.int32), sizes)),
                **self._recorded(),
            },
        )
        return Generated(
            payload=payload,
            reason=self.reason or FinishReason.ABORTED,
            oldest_version=min(versions, default=version),
            newest_version=max(versions, default=version),
            num_units=self.num_generated,
        )

    def _recorded(self) -> dict[str, Array]:
        """Records of each unit but the last; nothing where nothing was generated: a forward may lack."""
        if not self.num_generated:
            return {}
        return {name: _recorded(rows[: len(self.tokens) - 1]) for name, rows in self.records.items()}


@attrs.define(eq=False)
class TokenRequestState(RequestState[TokenSequence]):
    """A request for completions in flight: its samples share the prompt.

    Attributes:
        prompt: Token ids of its prompt.
        conditioning: How its prompt enters, where the ids do not say it all.
    """

    prompt: list[int]
    conditioning: Conditioning | None = None

    def begin(self, index: int) -> TokenSequence:
        """Sample `index`: the prompt, and nothing after it."""
        return TokenSequence(self, index, list(self.prompt))

    @property
    def num_prompt(self) -> int:
        """Units of the prompt."""
        return len(self.prompt)

    def common(self, other: TokenRequestState) -> int:
        """Units that both prompts begin with."""
        if self is other:
            return self.num_prompt
        size = min(self.num_prompt, other.num_prompt)
        differs_N = prompt_ids(self.request.prompt)[:size] != prompt_ids(other.request.prompt)[:size]
        return int(differs_N.argmax()) if differs_N.any() else size

    @property
    def longest(self) -> int:
        """Units of the prompt and of a completion, at most."""
        return self.num_prompt + self.request.sampling.max_units

    @property
    def offset(self) -> int:
        """Difference between the position of a unit behind the prompt and its place."""
        return offset_of(self.conditioning)


def offset_of(conditioning: Conditioning | None) -> int:
    """Difference between position and place of a unit behind the prompt; 0 without conditioning."""
    return 0 if conditioning is None else conditioning.next_position - conditioning.positions.shape[-1]


def prompt_ids(payload: Payload) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The `prompt` of a payload, int32 [P]."""
    return np.frombuffer(payload.arrays["prompt"].data, np.int32)


def _recorded(rows: torch.Tensor) -> Array:
    """Rows as they lie: NumPy does not know every dtype."""
    return Array(dtype=dtype_name(rows.dtype), shape=tuple(rows.shape), data=rows.view(torch.uint8).numpy().tobytes())


def _array(dtype: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Array:
    return Array(dtype=dtype, shape=values.shape, data=values.tobytes())


class TokenEngine(ServedEngine[TokenSequence]):
    """Generates tokens."""

    @property
    @abc.abstractmethod
    def _vocabulary(self) -> int:
        """Token ids below it can be in a prompt."""

    def _admit(self, request: Request) -> TokenRequestState:
        conditioning = self._check(request)
        return TokenRequestState(request, ServedHandle(request), 0, prompt_ids(request.prompt).tolist(), conditioning)

    def _check(self, request: Request) -> Conditioning | None:
        """Conditioning of a request's prompt; EngineError if it cannot be generated."""
        check_request(request, context_length=self._context.context_length, vocabulary=self._vocabulary)
        return condition(request.prompt, self._context.model, f"request {request.request_id!r}")
