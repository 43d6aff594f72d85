"""A process that scores completions: `python -m cosmos_core.rollout.rewards.worker SOCKET SHARED`.

It speaks over an inherited socket, loads the recipe's rewards by name, runs plain scores on one thread in the order of
arrival, coroutines beside them and each other, and ends when the socket closes or its parent dies. Shared memory tells
which plain score it is at: no message could, of one that lets no other thread run, or ends the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import math
import mmap
import numbers
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

import attrs

from cosmos_core.errors import CosmosError, PluginError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Reward, RewardContext, Score
from cosmos_core.rollout.rewards.messages import FROM_WORKER, TO_WORKER, Deferred, Outcome, Scored, Setup, Task
from cosmos_core.rollout.workers import process
from cosmos_core.rollout.workers.process import Ready, described, live, shown, traced
from cosmos_core.types import JSON, SampleStatus

_TOGETHER_S: Final = 0.005
"""How long outcomes wait to be told with others: the replica need not wake for each."""


def load(setup: Setup) -> list[Reward]:
    """Make the rewards, and have them load what they load.

    Raises:
        CosmosError: A plugin is missing or broken, refuses its options, or cannot load.
    """
    plugins = PluginSet.load(("reward", each.plugin) for each in setup.rewards)
    rewards: list[Reward] = []
    for index, each in enumerate(setup.rewards):
        context = RewardContext(name=each.label, seed=setup.seed)
        reward: Reward = plugins.create("reward", each.plugin, each.options, context, f"reward.{index}.options")
        if hasattr(reward, "load"):
            _load(reward.load, f"reward {each.label}")
        rewards.append(reward)
    return rewards


def _load(load: Callable[[], None], what: str) -> None:
    try:
        load()
    except CosmosError as error:
        told = str(error)
        raise PluginError(told if told.startswith(f"{what}: ") else f"{what}: {told}") from error
    except Exception as error:
        raise PluginError(f"{what} could not load: {described(error)}") from error


class Worker(process.Worker):
    """Scores for one replica."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, TO_WORKER, FROM_WORKER)
        self._rewards: list[tuple[Reward, float]] = []
        self._deferred: set[asyncio.Task[None]] = set()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "scores")
        self._answers: deque[tuple[Task, Outcome | Awaitable[Any]]] = deque()
        self._together_s = _TOGETHER_S
        self._at = mmap.mmap(int(sys.argv[2]), 0)
        self._has_told = False

    async def serve(self) -> None:
        """Load the rewards, then score until the other side closes."""
        async for messages in self.arrivals():
            tasks: list[Task] = []
            for message in messages:
                if isinstance(message, Setup):
                    self._rewards = [*zip(load(message), (each.timeout_s for each in message.rewards), strict=True)]
                    self._together_s = min([_TOGETHER_S, *(each.timeout_s / 4 for each in message.rewards)])
                    self.send(Ready())
                else:
                    tasks.append(message)
            if tasks:
                await self._score(tasks)

    async def _score(self, tasks: Sequence[Task]) -> None:
        """Score what came together, and tell it together unless that takes a while; coroutines go on meanwhile."""
        loop, waiting = asyncio.get_running_loop(), deque(tasks)
        while waiting:
            self._has_told = False
            timer = loop.call_later(self._together_s, self._tell)
            await loop.run_in_executor(self._thread, self._call, waiting)
            timer.cancel()
            self._tell()

    def _call(self, waiting: deque[Task]) -> None:
        # It is told once meanwhile: what follows gets a timer of its own.
        while waiting and not self._has_told:
            task = waiting.popleft()
            self._at[:] = task.ticket.to_bytes(len(self._at))
            self._answers.append((task, _scored(self._rewards[task.reward][0], task)))

    def _tell(self) -> None:
        self._has_told = True
        messages: list[Scored | Deferred] = []
        while self._answers:
            task, answer = self._answers.popleft()
            if isinstance(answer, Outcome):
                messages.append(Scored(ticket=task.ticket, outcome=answer))
                continue
            messages.append(Deferred(ticket=task.ticket))
            waiter = asyncio.ensure_future(self._finish(task.ticket, answer, self._rewards[task.reward][1]))
            self._deferred.add(waiter)
            waiter.add_done_callback(self._deferred.discard)
        self.send(*messages)

    async def _finish(self, ticket: int, score: Awaitable[Any], timeout_s: float) -> None:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                value = await score
            outcome = judged(value)
        except Exception as error:  # noqa: BLE001 - as below
            late = Outcome(value=None, status=SampleStatus.REWARD_TIMEOUT)
            outcome = late if deadline.expired() else raised(error)
        self.send(Scored(ticket=ticket, outcome=outcome))


def _scored(reward: Reward, task: Task) -> Outcome | Awaitable[Any]:
    """Score a completion; a coroutine's score is still to be awaited."""
    try:
        score = reward.score(task.completion)
        return cast("Awaitable[Any]", score) if inspect.isawaitable(score) else judged(score)
    except Exception as error:  # noqa: BLE001 - any plugin error is an answer: this completion has no score
        return raised(error)


def raised(error: BaseException) -> Outcome:
    """The outcome of a completion whose score raised, with the place, if that is a plugin's, and the traceback."""
    detail, place, trace = traced(error)
    return attrs.evolve(failed(detail), place=place, trace=trace)


def failed(detail: str) -> Outcome:
    """The outcome of a completion that could not be scored."""
    return Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail)


def judged(score: Any) -> Outcome:
    """The outcome of what a reward returned: a finite number, or why it is none."""
    value = score.value if isinstance(score, Score) else score
    if not isinstance(value, numbers.Real):
        return failed(shown(f"the score is no number but {value!r:.200}"))
    if not math.isfinite(value):
        return failed(shown(f"the score is not finite: {value!r:.200}"))
    details = score.details if isinstance(score, Score) else {}
    detail = shown(", ".join(f"{name}: {_rounded(each)}" for name, each in details.items()))
    return Outcome(value=float(value), status=SampleStatus.OK, detail=detail)


def _rounded(value: JSON) -> str:
    """JSON as people read it: floats have four digits, large ones one behind the point."""

    def short(digits: str) -> float:
        number = float(digits)
        return float(f"{number:.4g}") if abs(number) < 1000.0 else round(number, 1)

    return json.dumps(json.loads(json.dumps(value, default=repr), parse_float=short), ensure_ascii=False)


if __name__ == "__main__":
    live(Worker)
