"""Completions in flight: samples that are sequences of tokens."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from cosmos_core.protocols import Conditioning, FinishReason, Generated
from cosmos_core.rollout.serving.flight import Flight
from cosmos_core.rollout.serving.randomness import sample_key
from cosmos_core.types import Array, Payload
from cosmos_core.weights.shards import dtype_name


@attrs.define(eq=False)
class Sequence:
    """One sample of a request.

    Attributes:
        flight: Its request.
        index: Its place among the request's samples.
        tokens: Prompt, then what was generated.
        logprobs: Of each generated unit.
        spans: (first generated unit, weight version), ascending.
        slot: Its row of the cache; -1 while it waits or when it is finished.
        cached: Units in the cache, while it is in a slot but not decoding yet.
        prefix_version: Weight version under which its prompt was cached.
        origin: The sample whose computation of the prompt is in its slot; itself, or one that it was copied from.
        records: What forwards recorded, by name: for each unit, in order (see `records`).
        reason: Why it ended; None while it goes on.
    """

    flight: TokenFlight
    index: int
    tokens: list[int]
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[tuple[int, int]] = attrs.field(factory=list)
    slot: int = -1
    cached: int = 0
    prefix_version: int = -1
    origin: Sequence | None = None
    records: dict[str, torch.Tensor] = attrs.field(factory=dict)
    reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        """Units generated so far."""
        return len(self.logprobs)

    @property
    def key(self) -> int:
        """Key of its random numbers."""
        return sample_key(self.flight.request.seed, self.index)

    def mark(self, version: int) -> None:
        """Its next units come of `version`."""
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
                **self.flight.request.prompt.arrays,
                "completion": _array("int32", np.asarray(self.tokens[self.flight.num_prompt :], np.int32)),
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
        """What was recorded of each unit but the last; nothing where nothing was generated: a forward may lack."""
        if not self.num_generated:
            return {}
        return {name: _recorded(rows[: len(self.tokens) - 1]) for name, rows in self.records.items()}


@attrs.define(eq=False)
class TokenFlight(Flight[Sequence]):
    """A request for completions in flight: its samples share the prompt.

    Attributes:
        prompt: Token ids of its prompt.
        conditioning: How its prompt enters, where the ids do not say it all.
    """

    prompt: list[int]
    conditioning: Conditioning | None = None

    def begin(self, index: int) -> Sequence:
        """Sample `index`: the prompt, and nothing after it."""
        return Sequence(self, index, list(self.prompt))

    @property
    def num_prompt(self) -> int:
        """Units of the prompt."""
        return len(self.prompt)

    @property
    def longest(self) -> int:
        """Units of the prompt and of a completion, at most."""
        return self.num_prompt + self.request.sampling.max_units

    @property
    def offset(self) -> int:
        """What is added to the place of a unit behind the prompt to make its position; 0 where both are the same."""
        return offset_of(self.conditioning)


def offset_of(conditioning: Conditioning | None) -> int:
    """See `Flight.offset`."""
    return 0 if conditioning is None else conditioning.next_position - conditioning.positions.shape[-1]


def prompt_ids(payload: Payload) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The `prompt` of a payload, int32 [P]."""
    return np.frombuffer(payload.arrays["prompt"].data, np.int32)


def _recorded(rows: torch.Tensor) -> Array:
    """Rows as they lie: NumPy does not know every dtype."""
    return Array(dtype=dtype_name(rows.dtype), shape=tuple(rows.shape), data=rows.view(torch.uint8).numpy().tobytes())


def _array(dtype: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Array:
    return Array(dtype=dtype, shape=values.shape, data=values.tobytes())
