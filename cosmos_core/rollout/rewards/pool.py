"""Scores completions in worker processes, beside generation, each score under its time limit.

One thread serves all workers. A worker that hangs or dies is replaced; what it was working on is tried again in a
worker of its own, unless it is plain which completion was to blame. So no completion pays for another.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import PluginError, TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.protocols import Completion
from cosmos_core.rollout.rewards.messages import FROM_WORKER, TO_WORKER, Deferred, Outcome, Outcomes, Setup, Task
from cosmos_core.rollout.workers.pool import WorkerPool
from cosmos_core.rollout.workers.process import GRACE_S, WorkerProcess, frame
from cosmos_core.transport.reports import Troubled
from cosmos_core.types import SampleStatus

_MAX_AHEAD: Final = 8
_MAX_DEFERRED: Final = 64
_TICKET_BYTES: Final = 8
MOST_LATE: Final = 5
"""Scores in a row that a reward may let time out, and times its time limit that this has to take: else it hangs."""


@attrs.define(kw_only=True, eq=False)
class Assignment:
    """A task of completion `index` of a job, and how it is going.

    It is alone if it must have a worker for itself, because it may be what broke the last one, and deferred if it goes
    on as a coroutine; `since` is when it was deferred, or could have its turn (monotonic seconds).
    """

    job: _Job
    index: int
    task: Task
    timeout_s: float
    encoded: bytes = b""
    alone: bool = False
    since: float = 0.0
    is_deferred: bool = False


class RewardProcess(WorkerProcess):
    """One worker.

    Attributes:
        assignments: Tasks that it has, by ticket, in the order in which they were given.
    """

    def __init__(self, setup: Setup) -> None:
        with os.fdopen(os.memfd_create("reward worker"), "w+b") as shared:
            shared.truncate(_TICKET_BYTES)
            self._at: Final = mmap.mmap(shared.fileno(), 0)
            module = "cosmos_core.rollout.rewards.worker"
            super().__init__(module, TO_WORKER.encode(setup), FROM_WORKER, shared.fileno())
        self.assignments: dict[int, Assignment] = {}

    def has_room(self, assignment: Assignment) -> bool:
        """True if it can be given this task now; some are sent ahead so that it never waits."""
        alone = assignment.alone or any(each.alone for each in self.assignments.values())
        if alone:
            return self.is_ready and not self.assignments
        num_deferred = sum(each.is_deferred for each in self.assignments.values())
        ahead = len(self.assignments) - num_deferred
        return self.is_ready and ahead < _MAX_AHEAD and num_deferred < _MAX_DEFERRED

    def assign(self, assignment: Assignment) -> None:
        """Give it a task."""
        assignment.since, assignment.is_deferred = time.monotonic(), False
        self.assignments[assignment.task.ticket] = assignment
        self.put(assignment.encoded)

    def receive(self) -> Iterator[tuple[Assignment, Outcome]]:
        """Yield each outcome that came, with the assignment it settles."""
        for message in self.messages():
            now, assignment = time.monotonic(), self.assignments.pop(message.ticket)
            if not assignment.is_deferred:
                for each in self.assignments.values():
                    each.since = each.since if each.is_deferred else now
            if isinstance(message, Deferred):
                assignment.is_deferred, assignment.since = True, now
                self.assignments[message.ticket] = assignment
            else:
                yield assignment, message.outcome

    def due(self) -> float:
        """When it is late, once it is ready (monotonic seconds); infinity while it owes nothing."""
        working = self.at_work()
        return min((each.since + each.timeout_s + each.is_deferred * GRACE_S for each in working), default=math.inf)

    def at_work(self) -> list[Assignment]:
        """The tasks that have begun: coroutines, and the one that its thread is at; if there are none, the next."""
        at = self.assignments.get(int.from_bytes(self._at))
        begun = [each for each in self.assignments.values() if each.is_deferred or each is at]
        return begun or [*self.assignments.values()][:1]


class _Job:
    """The completions of one `submit`."""

    def __init__(self, num_completions: int, num_rewards: int, done: Callable[[Outcomes], None]) -> None:
        self.outcomes: list[list[Outcome | None]] = [[None] * num_rewards for _ in range(num_completions)]
        self.num_open = num_completions * num_rewards
        self.done = done


class RewardPool(WorkerPool[RewardProcess]):
    """Worker processes for the rewards of a recipe; unless it `lasts`, as for strangers, it gives up one that hangs.

    Attributes:
        tell: Called on the pool's thread for each worker that ended.
        scoring_s: Seconds that scores took, summed over workers.
        num_replaced: Workers that hung or ended, each replaced by another.
    """

    def __init__(self, rewards: Sequence[RewardConfig], *, num_workers: int, seed: int, lasts: bool = False) -> None:
        super().__init__(thread="rewards", worker="a reward worker", num_workers=num_workers)
        self._rewards: Final = tuple(rewards)
        self._setup: Final = Setup(rewards=tuple(rewards), seed=seed)
        self._waiting: Final[deque[Assignment]] = deque()
        self._next_ticket = 0
        self.scoring_s = 0.0
        self.num_replaced = 0
        self._late: Final[dict[int, tuple[float, int]]] = {}
        self._lasts: Final = lasts
        self.tell: Callable[[Troubled], object] = lambda _: None
        self._repeated: Final = defaultdict[str, RepeatedWarning](lambda: RepeatedWarning(__name__))

    @property
    def is_ready(self) -> bool:
        """True if every worker has loaded the rewards."""
        workers = tuple(self._workers)
        return len(workers) == self._num_workers and all(worker.is_ready for worker in workers)

    def start(self) -> None:
        """Start the workers, if there is anything to score; returns at once."""
        if self._rewards:
            super().start()

    def submit(self, completions: Sequence[Completion], done: Callable[[Outcomes], None]) -> None:
        """Score completions with every reward; `done` is called on the pool's thread and must be quick."""
        if not completions or not self._rewards:
            done([[] for _ in completions])
            return
        job, given = _Job(len(completions), len(self._rewards), done), list(completions)
        self._submit(lambda: self._enqueue(job, given))

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _make(self) -> RewardProcess:
        return RewardProcess(self._setup)

    def _read(self, worker: RewardProcess) -> None:
        for assignment, outcome in worker.receive():
            self.scoring_s += time.monotonic() - assignment.since
            if outcome.status is SampleStatus.REWARD_TIMEOUT:
                self._blame(assignment)
            else:
                self._close(assignment, outcome)

    def _watch(self, index: int, outcome: Outcome) -> None:
        """Log where a reward raises, each place once, and give up one that answers nothing, by a PluginError."""
        reward, now = self._rewards[index], time.monotonic()
        self._log_raised(f"reward {reward.label}", outcome.place, outcome.trace)
        if outcome.status is not SampleStatus.REWARD_TIMEOUT:
            self._late.pop(index, None)
            return
        since, number = self._late.get(index, (now - reward.timeout_s, 0))
        self._late[index] = since, number + 1
        if not self._lasts and number + 1 >= MOST_LATE and now - since >= MOST_LATE * reward.timeout_s:
            raise PluginError(
                f"reward {reward.label}: the last {number + 1} scores were not there within {reward.timeout_s:g} s: it "
                f"hangs; mend it, or raise reward.{index}.timeout_s (or rollout.reward_workers) if it is only slow"
            )

    def _close(self, assignment: Assignment, outcome: Outcome) -> None:
        job, reward = assignment.job, assignment.task.reward
        self._watch(reward, outcome)
        job.outcomes[assignment.index][reward] = outcome
        job.num_open -= 1
        if job.num_open == 0:
            job.done([[each for each in row if each is not None] for row in job.outcomes])

    def _settle(self, worker: RewardProcess, how: str, *, is_late: bool) -> None:
        working, given = worker.at_work(), [*worker.assignments.values()]
        # One that ends after some scores must not take what it has not told each time: these are tried alone, too.
        suspects = working if is_late else given
        self.scoring_s += sum(time.monotonic() - each.since for each in working)
        others = [each for each in given if each not in suspects]
        if not is_late:
            labels = sorted({self._rewards[each.task.reward].label for each in working})
            whose = f"processes of reward {' or '.join(labels)}" if labels else "idle processes of rewards"
            self._repeated[whose]("%s ended: %s", whose, how)
            twice = " (a sample is tried twice)" if labels else ""
            self.tell(Troubled(what=f"{whose} that ended", number=1, last=how + twice))
        # A worker may die of something else (killed, out of memory): who is blamed for that was alone in it.
        if len(suspects) == 1 and (is_late or suspects[0].alone):
            self._blame(suspects.pop(), "" if is_late else how)
        for suspect in suspects:
            suspect.alone = True
        self._waiting.extendleft(reversed(suspects + others))
        self.num_replaced += 1

    def _blame(self, assignment: Assignment, how: str = "") -> None:
        """Settle a task whose process ended, and `how`, or which is late."""
        index, given = assignment.task.reward, assignment.task.completion
        status, why = SampleStatus.REWARD_FAILED, f"the reward's process ended ({how})"
        if not how:
            key = "timeout_s" if self._lasts else f"reward.{index}.timeout_s"
            status, why = SampleStatus.REWARD_TIMEOUT, f"no score within {assignment.timeout_s:g} s ({key})"
        detail = f"{why}: {given.text!r:.80} of the prompt {given.prompt.words!r:.80}"
        self._repeated[f"{index} {status}"]("reward %s: %s", self._rewards[index].label, detail)
        self._close(assignment, Outcome(value=None, status=status, detail=detail))

    def _enqueue(self, job: _Job, completions: Sequence[Completion]) -> None:
        for index, completion in enumerate(completions):
            for reward in range(len(self._rewards)):
                self._add(job, index, reward, completion)

    def _add(self, job: _Job, index: int, reward: int, completion: Completion) -> None:
        self._next_ticket += 1
        task = Task(ticket=self._next_ticket, reward=reward, completion=completion)
        # What is sent is in the frame; a video need not lie here twice.
        kept = attrs.evolve(task, completion=attrs.evolve(completion, payload=None, media=None))
        assignment = Assignment(job=job, index=index, task=kept, timeout_s=self._rewards[reward].timeout_s)
        try:
            assignment.encoded = frame(TO_WORKER.encode(task))
        except (TypeError, ValueError, OverflowError, BufferError, TransportError) as error:
            detail = f"the completion cannot be sent to a reward worker: {error}"
            self._close(assignment, Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail))
        else:
            self._waiting.append(assignment)

    def _dispatch(self) -> None:
        while self._waiting:
            assignment = self._waiting[0]
            free = [each for each in self._workers if each.has_room(assignment)]
            if not free:
                break
            self._waiting.popleft()
            min(free, key=lambda each: len(each.assignments)).assign(assignment)
