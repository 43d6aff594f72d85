"""The protocol of environment plugins: answer the model's turns of one dialogue until it is over."""

from __future__ import annotations

from typing import Protocol

import attrs

from cosmos_core.types import Prompt


@attrs.frozen(kw_only=True)
class EnvironmentContext:
    """The run, as an environment is told of it.

    Attributes:
        name: The name under which the recipe selected it.
        seed: `run.seed`.
    """

    name: str
    seed: int


@attrs.frozen(kw_only=True)
class EnvironmentCapabilities:
    """Properties of an environment.

    Attributes:
        rewards: Whether its turns carry rewards, whose sum is reported and counts with `environment.weight`.
        deterministic: Whether the same prompt, seed and turns always get the same answers.
    """

    rewards: bool = False
    deterministic: bool = True


@attrs.frozen(kw_only=True)
class Turn:
    """The environment's answer to one turn of the model.

    Attributes:
        observation: What the model is shown next, as words whatever they spell; None only where the dialogue is over.
        role: Whose turn of a chat the observation is: `user`, or another that chat templates know, such as `tool`.
            Where the model's template takes none of that role, it is the user's; in plain text it makes no difference.
        done: Whether the dialogue is over: the model is asked no more.
        reward: What this turn adds to the dialogue's reward, a finite number; ignored unless `rewards` is declared.
        detail: What is worth showing people of this turn.
    """

    observation: str | None = None
    role: str = "user"
    done: bool = False
    reward: float = 0.0
    detail: str = ""


class Environment(Protocol):
    """One dialogue. An instance is made for each sample, in a worker process apart from generation.

    Many dialogues share the event loop of a worker: what blocks belongs into `asyncio.to_thread`. `reset` and each
    `step` have `environment.timeout_s`. Raising says that the dialogue cannot go on: its sample gets a status.
    """

    async def reset(self, prompt: Prompt, seed: int) -> str | None:
        """Begin a dialogue.

        Args:
            prompt: The dataset row.
            seed: The same for all samples of a group, so that they begin alike.

        Returns:
            Words that follow those of the prompt; None where the prompt says it all.
        """

    async def step(self, text: str) -> Turn:
        """Answer one turn of the model, its stop token stripped."""

    async def close(self) -> None:
        """Let go of everything. Called once, whatever happened before, unless the worker itself was ended."""
