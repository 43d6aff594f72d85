"""The protocols of environment plugins: answer the model's turns of a dialogue, or be an agent that calls the model."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import attrs

from cosmos_core.types import Message, Prompt


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
        calls_model: Whether it is an `Agent`, which calls the model when it wants to; else an `Environment`.
    """

    rewards: bool = False
    deterministic: bool = True
    calls_model: bool = False


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
        media: Locations of images that the observation shows: local paths and `data:` URLs. Only of a model that takes
            images in turns (`cosmos_core.protocols.vision.DialogueVision`).
        places: Before which character of the observation each of them stands, in order; empty: all before the first.
    """

    observation: str | None = None
    role: str = "user"
    done: bool = False
    reward: float = 0.0
    detail: str = ""
    media: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


class Environment(Protocol):
    """One dialogue. An instance is made for each sample, in a worker process apart from generation.

    Many dialogues share the event loop of a worker: what blocks belongs into `asyncio.to_thread`. `reset` and each
    `step` have `environment.timeout_s`. Raising says that the dialogue cannot go on: its sample gets a status.
    """

    async def reset(self, prompt: Prompt, seed: int) -> str | Message | None:
        """Begin a dialogue.

        Args:
            prompt: The dataset row.
            seed: The same for all samples of a group, so that they begin alike.

        Returns:
            Words that follow those of the prompt, or a turn of the user's that may show images; None where the prompt
            says it all.
        """

    async def step(self, text: str) -> Turn:
        """Answer one turn of the model, its stop token stripped."""

    async def close(self) -> None:
        """Let go of everything. Called once, whatever happened before, unless the worker itself was ended."""


class Session(Protocol):
    """An agent's way to the model: an endpoint of OpenAI's API that records what it generates for this session.

    Attributes:
        base_url: `http://…/v1`, which names the session; any client of `/chat/completions` or `/responses` may use it.
        key: An API key that names the session, too, for clients that have a base URL of their own.
        model: The name under which the model is served.
        seed: The same for all samples of a group, so that they begin alike.
        variables: `OPENAI_BASE_URL`, `OPENAI_API_KEY` and what else tells a program of the session.
        client: An `openai.AsyncOpenAI` of the session; needs the package `openai`.
    """

    base_url: str
    key: str
    model: str
    seed: int
    variables: Mapping[str, str]

    @property
    def client(self) -> Any:
        """See `client`."""


class Agent(Protocol):
    """A program that does a task by calling the model. An instance is made for each sample, in a worker process.

    Many agents share the event loop of a worker, as environments do. A plain function is called in a thread. `run` has
    `environment.agent.timeout_s`; it is cancelled then, and where the run needs the sample no more. Raising says that
    the task could not be gone on with: its sample gets a status, unless a limit of the session was met, which makes it
    truncated.
    """

    def run(self, session: Session, task: Prompt) -> Awaitable[float | None] | float | None:
        """Do one task.

        Args:
            session: What it is to call. Calls whose messages go on from an earlier reply go on from its very tokens.
            task: The dataset row.

        Returns:
            The agent's own reward, a finite number, if `rewards` is declared and the endpoint was told none; else None.
        """
