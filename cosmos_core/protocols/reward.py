"""The protocol of reward plugins: score one completion."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Protocol

import attrs

from cosmos_core.types import JSON, Message, Payload, Prompt


@attrs.frozen(kw_only=True)
class RewardContext:
    """The run, as a reward is told of it.

    Attributes:
        name: What the recipe reports it as: its `name`, or the plugin's.
        seed: `run.seed`, for rewards that draw random numbers.
    """

    name: str
    seed: int


@attrs.frozen(kw_only=True)
class RewardCapabilities:
    """Properties of a reward.

    Attributes:
        payload_kinds: Kinds of payload it can score.
        deterministic: Whether the same completion always gets the same score.
    """

    payload_kinds: frozenset[str] = frozenset({"tokens"})
    deterministic: bool = True


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """A completion to score.

    Attributes:
        prompt: The dataset row.
        text: The completion as text, stop token stripped; empty for world models. Of a dialogue, both sides of it.
        payload: The arrays, for rewards that look at latents: `sample` and numbers about it, without what conditioned
            it and without the way there; None for text rewards.
        media: `frames` uint8 [F, height, width, 3] and `fps` (kind `media`); None where the engine renders nothing.
        truncated: Whether generation hit the longest length instead of stopping.
        turns: Who said what after the row, in order. Those of the role `assistant` are the model's, the others the
            environment's; of a completion without an environment, the one turn.
        num_units: Units that the model generated (tokens); None where that is not known.
    """

    prompt: Prompt
    text: str
    payload: Payload | None = None
    media: Payload | None = None
    truncated: bool = False
    turns: tuple[Message, ...] = ()
    num_units: int | None = None

    @property
    def own(self) -> str:
        """The model's own words, turn by turn on lines of their own; all of `text` where nobody else spoke."""
        if all(turn.role == "assistant" for turn in self.turns):
            return self.text
        return "\n".join(turn.content for turn in self.turns if turn.role == "assistant")


@attrs.frozen(kw_only=True)
class Score:
    """A number, and what is worth showing of how it came about."""

    value: float
    details: Mapping[str, JSON] = attrs.field(factory=dict)


class Reward(Protocol):
    """A scorer. It runs in a worker process of its own, apart from generation, under a timeout.

    Raising is the way to say that a completion could not be scored: the sample gets a status, never a number.
    """

    def score(self, completion: Completion) -> float | Score | Awaitable[float | Score]:
        """Score one completion; a finite number, higher is better.

        May be a coroutine function. A plain one is called on one thread of its worker, which is not the main thread.
        """


class RewardExtras(Protocol):
    """Methods that a reward may have beside `score`: any of them, each found by its name.

    A model may have `vet`, too, such as a world model: planning asks it where demonstrations are learned. It may have
    `prompt_text(payload) -> str`: the prompt of a payload as the model sees it, for `cosmos plan` to print.
    """

    def vet(self, prompt: Prompt) -> None:
        """Tell from a row alone, its reference, metadata or demonstration, that no completion of it could be scored.

        Planning asks about some of the dataset's rows, so that a run does not find out later.

        Raises:
            DataError: It is missing or of the wrong type; `score` raises for every completion of such a prompt, too.
        """

    def absent(self) -> str:
        """Say what is not here, such as a key, a package or a folder, and what to do; empty where `load` finds it all.

        Planning asks where the machine of the plan will score, before `load` is called anywhere: `cosmos plan` shows
        the answer, and no run starts with one. Asks nobody over a network, and reads no weights.
        """

    def unset_variables(self, given: Collection[str]) -> Sequence[str]:
        """Name the environment variables that `load` needs and that are not among those given.

        `given` are the variables that a launcher which submits runs sets for their processes.
        """

    def load(self) -> None:
        """Do what is dear before the first score, once, in a worker: weights, a service. Never while planning.

        Raises:
            CosmosError: It cannot be done here; the run ends with the reason.
        """
