"""Groups of samples on their way, and what episodes and sessions of agents have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import EngineError
from cosmos_core.protocols import (
    EnvironmentCapabilities,
    FinishReason,
    Generated,
    Handle,
    Model,
    Request,
    RolloutEngine,
)
from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.rollout.episodes.messages import Reply
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.episodes.recording import Recording
from cosmos_core.transport.bounds import DETAIL
from cosmos_core.types import Message, Payload, SampleStatus


@attrs.define(kw_only=True, eq=False)
class Sample:
    """One sample on its way.

    Attributes:
        index: Place in the group.
        group: The samples of its request.
        episode: Its number in the pool.
        played: How it came out; None while it goes on.
    """

    index: int
    group: Group[Any]
    episode: int = -1
    played: EpisodeResult | None = None


S = TypeVar("S", bound=Sample)


@attrs.define(kw_only=True, eq=False)
class Group(Generic[S]):
    """The samples of one request; one, or a document of an agent's, may have `longest` units, prompt included."""

    request: Request
    longest: int
    done: Callable[[list[EpisodeResult]], None]
    samples: list[S] = attrs.field(factory=list)


@attrs.define(kw_only=True, eq=False)
class SamplePlayer(Generic[S]):
    """Plays the samples of requests.

    Attributes:
        environment: The recipe's.
        capabilities: Of the environment, or the agent.
        model: Encodes what is said, and reads turns: a `MultiTurnModel`, as planning has checked.
        engine: Generates turns.
        pool: Has the environments, or the agents.
        version: Gives the version of the weights that are loaded.
        post: Runs what follows a call or an answer on the one thread of all samples.
        sees: Whether turns may show images.
    """

    environment: EnvironmentConfig
    capabilities: EnvironmentCapabilities
    model: Model
    engine: RolloutEngine
    pool: EnvironmentPool
    version: Callable[[], int]
    post: Callable[[Callable[[], None]], None]
    sees: bool = False
    _groups: dict[str, Group[S]] = attrs.field(factory=dict, init=False)

    def _is_over(self, group: Group[S]) -> bool:
        """True once all samples of a group came out, or nobody waits for them."""
        return self._groups.get(group.request.request_id) is not group

    def _posting(self, event: Callable[[Reply], None]) -> Callable[[Reply], None]:
        return lambda reply: self.post(functools.partial(event, reply))

    def _submit(self, request: Request, then: Callable[[Sequence[Generated]], None]) -> None:
        """Ask the engine; `then` gets what it made, and nothing if it failed as a whole: its health() says so."""

        def take(handle: Handle) -> None:
            try:
                made = handle.result(0)
            except EngineError:
                made = []
            then(made)

        for handle in self.engine.submit([request]):
            handle.add_done_callback(lambda handle: self.post(functools.partial(take, handle)))

    def _end(
        self,
        sample: S,
        status: SampleStatus,
        told: Sequence[str],
        recording: Recording,
        opening: Payload,
        *,
        reward: float | None,
        said: Sequence[Message],
        text: str | None = None,
    ) -> None:
        """End a sample, and the group if it is the last."""
        self.pool.forget(sample.episode)
        reason = FinishReason.STOP if status is SampleStatus.OK else FinishReason.LENGTH
        sample.played = EpisodeResult(
            generated=recording.generated(opening, reason, self.version(), self.model, self.environment.weight),
            status=status,
            reward=reward if self.capabilities.rewards else None,
            detail=f"{self.environment.label}: {'; '.join(told)}"[:DETAIL] if told else "",
            said=tuple(said),
            text=text,
        )
        group = sample.group
        played = [each.played for each in group.samples if each.played is not None]
        if len(played) == len(group.samples):
            del self._groups[group.request.request_id]
            group.done(played)
