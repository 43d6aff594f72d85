"""Messages between a replica and its reward workers, in frames of the strict codec."""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.protocols import Completion
from cosmos_core.rollout.workers.process import Broken, Ready
from cosmos_core.transport.codec import Codec
from cosmos_core.types import SampleStatus


@attrs.frozen(kw_only=True)
class Setup:
    """First message to a worker: the rewards to load, in the recipe's order."""

    rewards: tuple[RewardConfig, ...]
    seed: int


@attrs.frozen(kw_only=True)
class Task:
    """Score one completion with one reward."""

    ticket: int
    reward: int
    completion: Completion


@attrs.frozen(kw_only=True)
class Deferred:
    """The score is a coroutine that goes on beside the tasks that follow."""

    ticket: int


@attrs.frozen(kw_only=True)
class Outcome:
    """One reward of one completion: `value` is None unless `status` is OK; `detail` is why, or how so.

    Where the reward raised, `place` is the file and line, and `trace` the traceback.
    """

    value: float | None
    status: SampleStatus
    detail: str = ""
    place: str = ""
    trace: str = ""


Outcomes: TypeAlias = list[list[Outcome]]
"""Of each completion, of each reward."""


@attrs.frozen(kw_only=True)
class Scored:
    """The outcome of a task."""

    ticket: int
    outcome: Outcome


TO_WORKER: Final = Codec([Setup, Task])
FROM_WORKER: Final = Codec([Ready, Broken, Deferred, Scored])
