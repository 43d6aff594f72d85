"""Dialogues with a recipe's environment, of a model that is served in this process."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Sequence
from typing import Final

from cosmos_core.config.order import evaluation_seed
from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Conversing, Request, Sampling
from cosmos_core.rollout.episodes.dialogue import Played
from cosmos_core.rollout.episodes.episode import EpisodeParts, Episodes
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.run.artifacts.generate import Served
from cosmos_core.types import Payload, Prompt

_TICK_S: Final = 0.2


def play(
    served: Served,
    environment: EnvironmentConfig,
    asked: Sequence[tuple[int, Prompt, Payload]],
    sampling: Sampling,
    *,
    seed: int,
) -> list[Played]:
    """Play one dialogue of each held-out row, as an evaluation of a run does.

    Args:
        served: The model.
        environment: What answers it.
        asked: Numbers of rows, the rows, and what the model encodes them to.
        sampling: Of each dialogue; one sample.
        seed: `run.seed`.

    Raises:
        ConfigError: The model takes no observations.
        CosmosError: The environment cannot be loaded, or the engine failed.
    """
    if not isinstance(served.model, Conversing):
        raise ConfigError("environment: the model plugin has no encode_observation; remove [environment]")
    capabilities = PluginSet.load([("environment", environment.plugin)]).provider("environment", environment.plugin)
    events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    found: dict[int, Played] = {}
    with contextlib.closing(EnvironmentPool(environment, seed=seed)) as pool:
        pool.start()
        episodes = Episodes(
            EpisodeParts(
                environment=environment,
                capabilities=capabilities.capabilities,
                model=served.model,
                engine=served.engine,
                pool=pool,
                version=lambda: 0,
                post=events.put,
            )
        )
        for index, (row, prompt, payload) in enumerate(asked):
            request = Request(request_id=str(index), prompt=payload, sampling=sampling, seed=evaluation_seed(seed, row))
            keep = functools.partial(_keep, found, index)
            episodes.begin(request, prompt, longest=served.context_length, done=keep)
        while len(found) < len(asked):
            try:
                events.get(timeout=_TICK_S)()
            except queue.Empty:
                pool.check()
                served.engine.health()
    return [found[index] for index in range(len(asked))]


def _keep(found: dict[int, Played], index: int, played: list[Played]) -> None:
    (found[index],) = played
