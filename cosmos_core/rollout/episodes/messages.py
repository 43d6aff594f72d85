"""Messages between a replica and its environment workers, in frames of the strict codec."""

from __future__ import annotations

import math
import numbers
from typing import Any, Final, TypeAlias

import attrs

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.rollout.workers.process import Broken, Ready
from cosmos_core.transport.codec import Codec
from cosmos_core.types import Message, Prompt, SampleStatus

END_S: Final = 3.0
"""How long a worker that is to end may take to close its episodes."""
STUCK_EXIT: Final = 86
"""Exit code of a worker in which too many episodes that are over go on."""


@attrs.frozen(kw_only=True)
class Setup:
    """First message to a worker: the recipe's environment."""

    environment: EnvironmentConfig
    seed: int


@attrs.frozen(kw_only=True)
class Open:
    """Begin an episode."""

    episode: int
    prompt: Prompt
    seed: int


@attrs.frozen(kw_only=True)
class Begin:
    """Begin an agent: the fields of its `Session`."""

    episode: int
    prompt: Prompt
    seed: int
    base_url: str
    key: str
    model: str


@attrs.frozen(kw_only=True)
class Act:
    """Answer a turn of the model."""

    episode: int
    text: str


@attrs.frozen(kw_only=True)
class Close:
    """Nobody asks this episode any more."""

    episode: int


@attrs.frozen(kw_only=True)
class Began:
    """An episode has its turn: its time runs from now."""

    episode: int


@attrs.frozen(kw_only=True)
class Opened:
    """An episode has begun, perhaps with a turn of the user's that follows the prompt."""

    episode: int
    words: Message | None


@attrs.frozen(kw_only=True)
class Answered:
    """Answer to a turn: the fields of `cosmos_core.protocols.Turn`."""

    episode: int
    observation: str | None
    role: str
    done: bool
    reward: float
    detail: str
    media: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Ended:
    """An agent has done its task, perhaps with a reward of its own."""

    episode: int
    reward: float | None


@attrs.frozen(kw_only=True)
class Failed:
    """An episode cannot go on: for a fault or a delay of its own, or because it is lost with its process.

    Where its plugin raised, `place` is the file and line, and `trace` the traceback.
    """

    episode: int
    timed_out: bool
    detail: str
    is_lost: bool = False
    place: str = ""
    trace: str = ""

    @property
    def status(self) -> SampleStatus:
        """The status of the sample."""
        if self.is_lost:
            return SampleStatus.ENVIRONMENT_LOST
        return SampleStatus.ENVIRONMENT_TIMEOUT if self.timed_out else SampleStatus.ENVIRONMENT_FAILED


Question: TypeAlias = Open | Begin | Act
Reply: TypeAlias = Opened | Answered | Ended | Failed
"""Settles what an episode was asked; a worker answers each `Question` with one."""


def is_reward(value: Any) -> bool:
    """Tell whether something is a finite number, as rewards are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


TO_WORKER: Final = Codec([Setup, Open, Begin, Act, Close])
FROM_WORKER: Final = Codec([Ready, Broken, Began, Opened, Answered, Ended, Failed])
