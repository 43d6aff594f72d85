"""Scores in this process, where what a reward returns can be looked at."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs

from cosmos_core.protocols import Completion, Reward, Score
from cosmos_core.rollout.rewards.wire import WirePayload
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.reward.completions import shown

Ending: TypeAlias = Literal["never waits", "ends", "goes on", "hangs"]

_PATIENCE_S: Final = 5.0


@attrs.frozen(kw_only=True, eq=False)
class Judged:
    """A completion, and what scoring it did.

    Attributes:
        completion: What was scored.
        outcome: What `score` returned, or its coroutine.
        awaited: Whether `score` returned a coroutine.
        changed: Whether the prompt, the payload or the media are others since.
    """

    completion: Completion
    outcome: Any
    awaited: bool
    changed: bool

    @property
    def value(self) -> Any:
        """The number, or what was returned instead."""
        return number(self.outcome)


def number(outcome: Any) -> Any:
    """The number of what `score` returned, or what was returned instead."""
    return outcome.value if isinstance(outcome, Score) else outcome


def judge(reward: Reward, completions: Sequence[Completion]) -> list[Judged]:
    """Score completions one after the other, on one event loop as in a worker."""

    async def judge_all() -> list[Judged]:
        return [await _judge(reward, each) for each in completions]

    return asyncio.run(judge_all())


def attempt(reward: Reward, completion: Completion) -> Any:
    """What scoring the completion returns, or the exception that it raises."""

    async def score() -> Any:
        try:
            outcome: Any = reward.score(completion)
            return await outcome if inspect.isawaitable(outcome) else outcome
        except Exception as error:  # noqa: BLE001 - any exception says that there is no score
            return error

    return asyncio.run(score())


def cancel(reward: Reward, completion: Completion) -> Ending:
    """Begin to score, cancel at the first wait, and tell how that ends."""
    answer: concurrent.futures.Future[Ending] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(asyncio.run(_cancel(reward, completion)))
        except Exception as error:  # noqa: BLE001 - it is raised again in the thread that waits
            answer.set_exception(error)

    # A coroutine that cannot be cancelled would hold up a loop of this thread for ever.
    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(_PATIENCE_S)
    except TimeoutError:
        return "hangs"


async def _judge(reward: Reward, completion: Completion) -> Judged:
    before = _contents(completion)
    try:
        outcome: Any = reward.score(completion)
        awaited = inspect.isawaitable(outcome)
        if awaited:
            outcome = await outcome
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        fault(f"{shown(completion)} must get a score, but scoring it raised {type(error).__name__}: {error}")
    return Judged(completion=completion, outcome=outcome, awaited=awaited, changed=_contents(completion) != before)


def _contents(completion: Completion) -> Any:
    payloads = [None if each is None else WirePayload.of(each) for each in (completion.payload, completion.media)]
    return copy.deepcopy((completion.prompt, completion.text, payloads))


async def _cancel(reward: Reward, completion: Completion) -> Ending:
    outcome = reward.score(completion)
    if not inspect.isawaitable(outcome):
        return "never waits"
    task = asyncio.ensure_future(outcome)
    await asyncio.sleep(0)
    if not task.cancel():
        return "never waits"
    await asyncio.wait({task})
    return "ends" if task.cancelled() or task.exception() is not None else "goes on"
