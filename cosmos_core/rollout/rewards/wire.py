"""What a replica and its reward workers say to each other, in frames of the strict codec."""

from __future__ import annotations

from typing import Any, Final

import attrs

from cosmos_core.transport.codec import Codec
from cosmos_core.types import Array, Message, Payload, Prompt


@attrs.frozen(kw_only=True)
class RewardSetup:
    """One reward of the recipe."""

    plugin: str
    name: str
    options: dict[str, Any]
    timeout_s: float


@attrs.frozen(kw_only=True)
class Setup:
    """First message to a worker: the rewards to load, in the recipe's order."""

    rewards: tuple[RewardSetup, ...]
    seed: int


@attrs.frozen(kw_only=True)
class Ready:
    """The worker loaded every reward."""


@attrs.frozen(kw_only=True)
class Broken:
    """The worker could not load the rewards, and ends."""

    reason: str


@attrs.frozen(kw_only=True)
class WireArray:
    """An array of a payload."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@attrs.frozen(kw_only=True)
class WirePayload:
    """A payload, for rewards that look at latents or media."""

    kind: str
    arrays: dict[str, WireArray]

    @classmethod
    def of(cls, payload: Payload) -> WirePayload:
        """Copy a payload."""
        arrays = {
            name: WireArray(dtype=array.dtype, shape=array.shape, data=bytes(array.data))
            for name, array in payload.arrays.items()
        }
        return cls(kind=payload.kind, arrays=arrays)

    def payload(self) -> Payload:
        """The payload that it is of."""
        arrays = {
            name: Array(dtype=array.dtype, shape=array.shape, data=array.data) for name, array in self.arrays.items()
        }
        return Payload(kind=self.kind, arrays=arrays)


@attrs.frozen(kw_only=True)
class Task:
    """Score one completion with one reward."""

    ticket: int
    reward: int
    prompt: Prompt
    text: str
    truncated: bool
    turns: tuple[Message, ...]
    num_units: int | None
    payload: WirePayload | None
    media: WirePayload | None = None


@attrs.frozen(kw_only=True)
class Deferred:
    """The score is a coroutine that goes on beside the tasks that follow."""

    ticket: int


@attrs.frozen(kw_only=True)
class Scored:
    """A finite number, and what the reward has to say of it."""

    ticket: int
    value: float
    detail: str = ""


@attrs.frozen(kw_only=True)
class Unscored:
    """No score: the reward raised, gave no finite number, or (a coroutine) took too long."""

    ticket: int
    timed_out: bool
    detail: str


TO_WORKER: Final = Codec([Setup, Task])
FROM_WORKER: Final = Codec([Ready, Broken, Deferred, Scored, Unscored])
