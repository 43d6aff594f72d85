"""The agent `verifiers`: an environment of the verifiers library does its tasks, and its rewards are the samples'."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import attrs

from cosmos_core.config import option
from cosmos_core.errors import PluginError
from cosmos_core.protocols import Agent, EnvironmentCapabilities, EnvironmentContext, Provider, Session, hookimpl
from cosmos_core.types import JSON, Prompt
from cosmos_environment_verifiers.library import environment, tasks

_PATH: Final = "environment.options.env"


@attrs.frozen(kw_only=True)
class VerifiersOptions:
    """Options of environments of verifiers."""

    env: Mapping[str, JSON] = option(
        help="The table `[env]` of verifiers: `taskset` with its `id` and options, `id` of the environment where it is "
        "not the taskset's own, and a table for each agent of it (`agent.max_turns`, `agent.harness.id`)."
    )


class VerifiersAgent:
    """Has an environment of verifiers hold an episode of a task, its agents calling the session's model."""

    def __init__(self, options: VerifiersOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        self._config: Final = environment(options.env, _PATH)
        self._taskset: Final[Any] = options.env["taskset"]

    async def run(self, session: Session, task: Prompt) -> float | None:
        """Hold the episode; the sum of the rewards of the agents that are trained, None if there are no rewards.

        Raises:
            DataError: The row names no task.
            PluginError: The episode failed, or something was not scored.
        """
        import verifiers.v1 as vf  # noqa: PLC0415 - seconds of imports
        from verifiers.v1.utils.loaders import load_environment  # noqa: PLC0415

        given = await asyncio.to_thread(lambda: tasks(self._taskset, f"{_PATH}.taskset").of(task.metadata))
        made = await asyncio.to_thread(load_environment, self._config)
        # Keys are read from variables only; this one is never set, for the URL names the session.
        client = vf.EvalClientConfig(base_url=session.base_url, api_key_var="COSMOS_NO_KEY")
        async with made.serving():
            episode = await made.run_slot(made.slots(given)[0], vf.ModelContext(model=session.model, client=client))
        return _reward(episode, session.base_url)


def _reward(episode: Any, url: str) -> float | None:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        told = "; ".join(dict.fromkeys(f"{error.type}: {error.message}" for error in errors))
        raise PluginError(f"verifiers: the episode failed: {told or 'it does not say why'}")
    rewards: dict[tuple[str, str], Any] = {}
    for trace in episode.traces:
        seat, client = trace.agent, trace.agent.config.client
        if seat.trainable:
            rewards |= {(trace.id, name): reward for name, reward in trace.rewards.items()}
        elif client is not None and client.base_url == url:
            raise PluginError(
                f"{_PATH}.{seat.name}: the environment does not have {seat.name!r} trained, and every call of the "
                "run's model is trained on; give it another: a `client` with a `base_url`, and a `model`"
            )
    if unscored := sorted({name for (_, name), reward in rewards.items() if reward is None}):
        raise PluginError(f"verifiers: no score of {', '.join(unscored)}")
    return float(sum(reward.value for reward in rewards.values())) if rewards else None


@hookimpl
def cosmos_environment() -> Provider[Agent]:
    """The provider hook."""
    capabilities = EnvironmentCapabilities(calls_model=True, rewards=True, deterministic=False)
    return Provider(create=VerifiersAgent, options=VerifiersOptions, capabilities=capabilities)
