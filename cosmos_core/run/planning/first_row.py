"""The first row of a run as the model and the rewards take it, so that people see both before any process starts."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any, Final

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.observe.output import console
from cosmos_core.protocols import Completion, Dataset, Model, Reward, RewardCapabilities
from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.rollout.rewards.worker import failed, judged, raised
from cosmos_core.threads import begin
from cosmos_core.types import Message, Prompt

_LOOKED_AT: Final = 3
_WRONG: Final = "I do not know."
_SILENT_S: Final = 3.0
"""After which people are told what is waited for."""


@attrs.frozen(kw_only=True)
class Trial:
    """A reward's scores of a completion that should be good and of one that is not, or why there are none."""

    label: str
    good: Outcome
    wrong: Outcome


@attrs.frozen(kw_only=True)
class FirstRow:
    """A row, and what is made of it.

    Attributes:
        prompt: The row.
        shown: The prompt as the model sees it: the template rendered, special tokens in it.
        num_units: Units of the prompt; 0 where it has no length.
        good: A completion that should be good, and what it is: the row's demonstration or reference; empty without.
        trials: Of each reward that scores text and needs to load nothing.
    """

    prompt: Prompt
    shown: str
    num_units: int
    good: tuple[str, str]
    trials: tuple[Trial, ...]


def look_at_first(
    model: Model, dataset: Dataset, rewards: Sequence[tuple[RewardConfig, RewardCapabilities, Reward]], num_rows: int
) -> FirstRow | None:
    """Encode the first of the train rows that can be used, and have the rewards score two completions of it.

    Returns:
        None if none of the first rows can be used, as others say.

    Raises:
        ConfigError: A reward scores neither of the completions: it would score none of the run's.
    """
    for index in range(min(num_rows, _LOOKED_AT)):
        with contextlib.suppress(DataError):
            prompt = dataset.row("train", index)
            payload = model.encode(prompt)
            units = payload.arrays.get("prompt")
            shown = prompt.words if units is None or not hasattr(model, "prompt_text") else model.prompt_text(payload)
            good = _good(prompt)
            trials = [
                _tried(config, reward, prompt, good[1])
                for config, capable, reward in rewards
                if "tokens" in capable.payload_kinds and not hasattr(reward, "load") and _takes(reward, prompt)
            ]
            num_units = 0 if units is None else units.shape[0]
            return FirstRow(prompt=prompt, shown=shown, num_units=num_units, good=good, trials=tuple(trials))
    return None


def _good(prompt: Prompt) -> tuple[str, str]:
    if prompt.demonstration is not None:
        return "demonstration", prompt.demonstration
    return ("", "") if prompt.reference is None else ("reference", str(prompt.reference))


def _takes(reward: Reward, prompt: Prompt) -> bool:
    """True if the reward passes the row; rows that it does not are counted apart."""
    with contextlib.suppress(DataError):
        if hasattr(reward, "vet"):
            reward.vet(prompt)
        return True
    return False


def _tried(config: RewardConfig, reward: Reward, prompt: Prompt, good: str) -> Trial:
    scored = [_scored(config.label, reward, prompt, text, config.timeout_s) for text in (good, _WRONG)]
    if all(each.value is None for each in scored):
        tried = f"neither {good[:60]!r} nor {_WRONG!r}"
        raise ConfigError(f"reward {config.label}: it scores {tried} for the first row: {scored[0].detail}")
    return Trial(label=config.label, good=scored[0], wrong=scored[1])


def _scored(label: str, reward: Reward, prompt: Prompt, text: str, timeout_s: float) -> Outcome:
    """Score a completion on a thread, as a worker does; one that hangs is left behind."""
    turns = (Message(role="assistant", content=text),)
    completion = Completion(prompt=prompt, text=text, turns=turns, num_units=len(text.split()))

    def score() -> Outcome:
        made: Any = reward.score(completion)
        return judged(asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made)

    scored = begin(score, "reward")
    wait([scored], min(timeout_s, _SILENT_S))
    if not scored.done() and timeout_s > _SILENT_S:
        console().print(f"waiting for reward {label}, for at most {timeout_s:g} s", style="dim", markup=False)
        wait([scored], timeout_s - _SILENT_S)
    if not scored.done():
        return failed(f"no score within {timeout_s:g} s")
    error = scored.exception()
    return scored.result() if error is None else raised(error)


async def _awaited(score: Any) -> Any:
    return await score
