"""The first row of a run as the model and the rewards take it, so that people see both before any process starts."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Final

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, Dataset, Model, Reward, RewardCapabilities
from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.rollout.rewards.worker import failed, judged, raised
from cosmos_core.run.fork import watched
from cosmos_core.threads import awaitable, begin
from cosmos_core.types import Message, Prompt

_LOOKED_AT: Final = 3
_WRONG: Final = "I do not know."
_LAST_NUMBER: Final = re.compile(r"(?<!\d)(?:-|(?<!\d[.,]))\d+(?:[.,]\d+)*(?=\D*$)")
"""It begins at no digit within a number: long ones would take the square of their length."""
_GRACE_S: Final = 3.0


@attrs.frozen(kw_only=True)
class Trial:
    """A reward's scores of completions, by what these are, or why there are none."""

    label: str
    outcomes: Mapping[str, Outcome]


@attrs.frozen(kw_only=True)
class FirstRow:
    """A row, and what is made of it.

    Attributes:
        prompt: The row.
        shown: The prompt as the model sees it: the template rendered, special tokens in it.
        num_units: Units of the prompt; 0 where it has no length.
        completions: By what they are: the row's demonstration and reference, or an empty answer; and a wrong answer.
        trials: Of each reward that scores text and needs to load nothing.
    """

    prompt: Prompt
    shown: str
    num_units: int
    completions: Mapping[str, str]
    trials: tuple[Trial, ...]


def look_at_first(
    model: Model, dataset: Dataset, rewards: Sequence[tuple[RewardConfig, RewardCapabilities, Reward]], num_rows: int
) -> FirstRow | None:
    """Encode the first of the train rows that can be used, and have the rewards score completions of it.

    Returns:
        None if none of the first rows can be used, as others say.

    Raises:
        ConfigError: A reward scores none of the completions: it would score none of the run's.
    """
    for index in range(min(num_rows, _LOOKED_AT)):
        with contextlib.suppress(DataError):
            prompt = dataset.row("train", index)
            payload = model.encode(prompt)
            units = payload.arrays.get("prompt")
            shown = prompt.words if units is None or not hasattr(model, "prompt_text") else model.prompt_text(payload)
            completions = _completions(prompt)
            trials = [
                _tried(index, config, reward, prompt, completions)
                for index, (config, capable, reward) in enumerate(rewards)
                if "tokens" in capable.payload_kinds and not hasattr(reward, "load") and _takes(reward, prompt)
            ]
            num_units = 0 if units is None else units.shape[0]
            return FirstRow(
                prompt=prompt, shown=shown, num_units=num_units, completions=completions, trials=tuple(trials)
            )
    return None


def _completions(prompt: Prompt) -> dict[str, str]:
    """Completions by what they are. A careless demonstrator is right with the reference at the end."""
    shown, reference = prompt.demonstration, None if prompt.reference is None else str(prompt.reference)
    mended = None if shown is None or reference is None else _LAST_NUMBER.sub(lambda _: reference, shown)
    found = {"demonstration": shown, "reference": reference, "demonstration with the reference": mended}
    names = {text: what for what, text in reversed(found.items())}
    known = {what: text for what, text in found.items() if text is not None and names[text] == what}
    return (known or {"empty answer": ""}) | {"wrong answer": _WRONG}


def _takes(reward: Reward, prompt: Prompt) -> bool:
    """True if the reward passes the row; rows that it does not are counted apart."""
    with contextlib.suppress(DataError):
        if hasattr(reward, "vet"):
            reward.vet(prompt)
        return True
    return False


def _tried(index: int, config: RewardConfig, reward: Reward, prompt: Prompt, completions: Mapping[str, str]) -> Trial:
    scored = _scored(index, config, reward, prompt, list(completions.values()))
    if all(each.value is None for each in scored):
        tried = " nor ".join(repr(text[:60]) for text in completions.values())
        raise ConfigError(f"reward {config.label}: it scores neither {tried} for the first row: {scored[0].detail}")
    return Trial(label=config.label, outcomes=dict(zip(completions, scored, strict=True)))


def _scored(index: int, config: RewardConfig, reward: Reward, prompt: Prompt, texts: Sequence[str]) -> list[Outcome]:
    """Score completions as a worker does: coroutines at once, so that one of batches gets them together."""
    is_awaited = inspect.iscoroutinefunction(reward.score)
    came: dict[str, Outcome] = {}
    timeout_s, key = config.timeout_s, f"reward.{index}.timeout_s"
    late = f"no score within {timeout_s:g} s ({key})"

    async def score(text: str) -> None:
        turns = (Message(role="assistant", content=text),)
        completion = Completion(prompt=prompt, text=text, turns=turns, num_units=len(text.split()))
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                call = awaitable(lambda: reward.score(completion))
                made = call() if is_awaited else await asyncio.wrap_future(begin(call, "reward"))
                came[text] = judged(await made if inspect.isawaitable(made) else made)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a reward may raise anything
            came[text] = failed(late) if deadline.expired() else raised(error)

    async def every() -> None:
        if is_awaited:
            await asyncio.gather(*map(score, texts))
            return
        for text in texts:
            await score(text)

    limit_s = timeout_s * (1 if is_awaited else len(texts)) + _GRACE_S
    each = "" if is_awaited else f" for each of {len(texts)} completions"
    with watched(limit_s + _GRACE_S, f"reward {config.label}, for at most {timeout_s:g} s{each} ({key})"):
        # A coroutine that blocks its loop, or a thread of it, is left behind with its thread: other scores have come.
        scored = begin(lambda: asyncio.run(every()), "rewards")
        wait([scored], limit_s)
    if scored.done():
        scored.result()
    return [came.get(text, failed(late)) for text in texts]
