"""Plays the samples of requests, with an environment that answers turns or with agents that call the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.protocols import EnvironmentCapabilities, Model
from cosmos_core.protocols.vision import DialogueVision
from cosmos_core.rollout.endpoint.server import Endpoint
from cosmos_core.rollout.episodes.agents import Agents
from cosmos_core.rollout.episodes.episode import Episodes

Player: TypeAlias = Episodes | Agents


def sees_turns(model: Model, *, takes_media: bool) -> bool:
    """Tell whether the turns of dialogues may show images to a model, on an engine that takes media or does not."""
    return takes_media and isinstance(model, DialogueVision)


def player_of(
    environment: EnvironmentConfig, capabilities: EnvironmentCapabilities, *, name: str, **parts: Any
) -> Player:
    """The player for an environment; `name` is that of the model, and `parts` are the other attributes of either."""
    given = {"environment": environment, "capabilities": capabilities, **parts}
    return Agents(name=name, **given) if capabilities.calls_model else Episodes(**given)


@contextlib.contextmanager
def serving(player: Player | None) -> Iterator[Callable[[], None]]:
    """Serve the endpoint of agents, if they are some; yields what raises ReplicaError if that has failed.

    Raises:
        ReplicaError: It cannot listen.
    """
    if not isinstance(player, Agents):
        yield lambda: None
        return
    endpoint = Endpoint(player, player.environment.agent.host)
    endpoint.start()
    player.url = endpoint.url
    try:
        yield endpoint.check
    finally:
        endpoint.close()
