"""Scores completions in worker processes, beside generation, each score under its time limit.

One thread serves all workers. A worker that hangs or dies is replaced; what it may have been working on is tried again
in a worker of its own, unless it is plain which completion was to blame. So no completion pays for another.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import PluginError, ReplicaError, TransportError
from cosmos_core.protocols import Completion
from cosmos_core.rollout.frames import frame
from cosmos_core.rollout.reward_process import Assignment, RewardProcess
from cosmos_core.rollout.reward_wire import (
    TO_WORKER,
    Broken,
    RewardSetup,
    Scored,
    Setup,
    Task,
    Unscored,
    WirePayload,
)
from cosmos_core.rollout.supervised import SupervisedThread
from cosmos_core.types import SampleStatus

_LOG: Final = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Outcome:
    """What one reward made of one completion: `value` is None unless `status` is OK; `detail` is why, or how so."""

    value: float | None
    status: SampleStatus
    detail: str = ""


Outcomes = list[list[Outcome]]
"""Of each completion, of each reward."""


class _Job:
    """The completions of one `submit`."""

    def __init__(self, num_completions: int, num_rewards: int, done: Callable[[Outcomes], None]) -> None:
        self.outcomes: list[list[Outcome | None]] = [[None] * num_rewards for _ in range(num_completions)]
        self.num_open = num_completions * num_rewards
        self.done = done


class RewardPool:
    """Worker processes for the rewards of a recipe.

    Args:
        rewards: The recipe's rewards.
        num_workers: Processes.
        seed: `run.seed`.
    """

    def __init__(self, rewards: Sequence[RewardConfig], *, num_workers: int, seed: int) -> None:
        self._rewards: Final = tuple(rewards)
        self._num_workers: Final = num_workers
        self._setup: Final = Setup(
            rewards=tuple(
                RewardSetup(plugin=each.plugin, options=dict(each.options), timeout_s=each.timeout_s)
                for each in rewards
            ),
            seed=seed,
        )
        self._selector: Final = selectors.DefaultSelector()
        self._wake: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._submitted: Final[deque[tuple[_Job, list[Completion]]]] = deque()
        self._waiting: Final[deque[Assignment]] = deque()
        self._open: Final[dict[int, tuple[_Job, int]]] = {}
        self._workers: Final[set[RewardProcess]] = set()
        self._thread: Final = SupervisedThread("rewards", self._run)
        self._closing = False
        self._next_ticket = 0
        self._scoring_s = 0.0

    @property
    def scoring_s(self) -> float:
        """Seconds that scores took, summed over workers."""
        return self._scoring_s

    def start(self) -> None:
        """Start the workers, if there is anything to score; returns at once."""
        if self._rewards:
            self._thread.start()

    def close(self) -> None:
        """End the workers; what was not scored is forgotten. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def check(self) -> None:
        """Return if the pool can score.

        Raises:
            PluginError: The rewards cannot be loaded.
            ReplicaError: The pool failed.
        """
        self._thread.check()

    def submit(self, completions: Sequence[Completion], done: Callable[[Outcomes], None]) -> None:
        """Score completions with every reward; `done` is called on the pool's thread and must be quick."""
        if not completions or not self._rewards:
            done([[] for _ in completions])
            return
        self._submitted.append((_Job(len(completions), len(self._rewards), done), list(completions)))
        os.eventfd_write(self._wake, 1)

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._wake, selectors.EVENT_READ)
            for _ in range(self._num_workers):
                self._spawn()
            while not self._closing:
                self._turn()
        finally:
            for worker in self._workers:
                worker.end()

    def _turn(self) -> None:
        deadline = min((worker.deadline() for worker in self._workers), default=float("inf"))
        wait_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.eventfd_read(self._wake)
            else:
                self._serve(key.data)
        now = time.monotonic()
        for worker in [each for each in self._workers if each.deadline() <= now]:
            self._replace(worker, is_late=True)
        self._enqueue()
        self._dispatch()

    def _spawn(self) -> None:
        worker = RewardProcess(self._setup)
        self._workers.add(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _serve(self, worker: RewardProcess) -> None:
        if worker.wants_write:
            worker.send()
        try:
            for assignment, message in worker.receive():
                if isinstance(message, Broken):
                    raise PluginError(message.reason)
                assert assignment is not None
                self._settle(assignment, message)
        except EOFError:
            self._replace(worker, is_late=False)
        except TransportError as error:
            _LOG.warning("a reward worker sent what cannot be read (%s); replacing it", error)
            self._replace(worker, is_late=False)

    def _settle(self, assignment: Assignment, message: Scored | Unscored) -> None:
        self._scoring_s += time.monotonic() - assignment.since
        if isinstance(message, Scored):
            outcome = Outcome(value=message.value, status=SampleStatus.OK, detail=message.detail)
        else:
            status = SampleStatus.REWARD_TIMEOUT if message.timed_out else SampleStatus.REWARD_FAILED
            outcome = Outcome(value=None, status=status, detail=message.detail)
        self._close(assignment.task, outcome)

    def _close(self, task: Task, outcome: Outcome) -> None:
        job, index = self._open.pop(task.ticket)
        job.outcomes[index][task.reward] = outcome
        job.num_open -= 1
        if job.num_open == 0:
            job.done([[each for each in row if each is not None] for row in job.outcomes])

    def _replace(self, worker: RewardProcess, *, is_late: bool) -> None:
        self._selector.unregister(worker.socket)
        self._workers.discard(worker)
        # Its socket closes a moment before its exit code is known.
        suspects, others, how = worker.end(0.0 if is_late else 1.0)
        if not worker.is_ready:
            raise ReplicaError(f"a reward worker did not start: {how}; its output is in this replica's output")
        # A worker may die of something else (killed, out of memory): who is blamed for that was alone in it.
        if len(suspects) == 1 and (is_late or suspects[0].alone):
            self._blame(suspects[0], is_late=is_late, how=how)
            suspects = []
        for suspect in suspects:
            suspect.alone = True
        self._waiting.extendleft(reversed(suspects + others))
        self._spawn()

    def _blame(self, assignment: Assignment, *, is_late: bool, how: str) -> None:
        name = self._rewards[assignment.task.reward].plugin
        if is_late:
            detail = f"{name}: no score within {assignment.timeout_s:g} s"
            outcome = Outcome(value=None, status=SampleStatus.REWARD_TIMEOUT, detail=detail)
        else:
            detail = f"{name}: the reward ended its process ({how})"
            outcome = Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail)
        _LOG.warning("%s", detail)
        self._close(assignment.task, outcome)

    def _enqueue(self) -> None:
        while self._submitted:
            job, completions = self._submitted.popleft()
            for index, completion in enumerate(completions):
                for reward in range(len(self._rewards)):
                    self._add(job, index, reward, completion)

    def _add(self, job: _Job, index: int, reward: int, completion: Completion) -> None:
        self._next_ticket += 1
        payload = completion.payload
        task = Task(
            ticket=self._next_ticket,
            reward=reward,
            prompt=completion.prompt,
            text=completion.text,
            truncated=completion.truncated,
            payload=None if payload is None else WirePayload.of(payload),
        )
        self._open[task.ticket] = (job, index)
        try:
            encoded = frame(TO_WORKER.encode(task))
        except (TypeError, ValueError, OverflowError, TransportError) as error:
            detail = f"the row cannot be sent to a reward worker: {error}"
            self._close(task, Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail))
            return
        timeout_s = self._rewards[reward].timeout_s
        self._waiting.append(Assignment(task=task, timeout_s=timeout_s, encoded=encoded))

    def _dispatch(self) -> None:
        while self._waiting:
            assignment = self._waiting[0]
            free = [each for each in self._workers if each.has_room(assignment)]
            if not free:
                break
            self._waiting.popleft()
            min(free, key=lambda each: each.load).assign(assignment)
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wants_write else 0)
            if self._selector.get_key(worker.socket).events != events:
                self._selector.modify(worker.socket, events, worker)
