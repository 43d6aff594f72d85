"""The replica's side of one reward worker: its process, its socket, what it was given and since when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import attrs

from cosmos_core.rollout.rewards.wire import FROM_WORKER, TO_WORKER, Deferred, Ready, Setup, Task
from cosmos_core.rollout.workers.line import WorkerLine

_START_S: Final = 120.0
_GRACE_S: Final = 1.0
"""How much later than the worker's own time limit of a coroutine the replica takes action."""

_MAX_AHEAD: Final = 8
_MAX_DEFERRED: Final = 64


@attrs.define(kw_only=True, eq=False)
class Assignment:
    """A task, and how it is going.

    Attributes:
        task: What to score.
        timeout_s: Seconds that the score may take.
        encoded: The task's frame.
        alone: Whether it must have a worker for itself, because it may be what broke the last one.
        since: When it had its turn, or when it was deferred (monotonic seconds).
        is_deferred: Whether it goes on as a coroutine.
    """

    task: Task
    timeout_s: float
    encoded: bytes
    alone: bool = False
    since: float = 0.0
    is_deferred: bool = False


class RewardProcess:
    """One worker. All methods are called on the pool's thread."""

    def __init__(self, setup: Setup) -> None:
        self._line = WorkerLine("cosmos_core.rollout.rewards.worker", TO_WORKER.encode(setup))
        self.socket = self._line.socket
        self.is_ready = False
        self._started = time.monotonic()
        self._assignments: dict[int, Assignment] = {}
        self._num_deferred = 0

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return self._line.wants_write

    def send(self) -> None:
        """Send what the socket takes now."""
        self._line.send()

    @property
    def load(self) -> int:
        """Tasks that it has."""
        return len(self._assignments)

    def has_room(self, assignment: Assignment) -> bool:
        """Whether to give it this task now; some are sent ahead so that it never waits."""
        alone = assignment.alone or any(each.alone for each in self._assignments.values())
        if alone:
            return self.is_ready and not self._assignments
        ahead = len(self._assignments) - self._num_deferred
        return self.is_ready and ahead < _MAX_AHEAD and self._num_deferred < _MAX_DEFERRED

    def assign(self, assignment: Assignment) -> None:
        """Give it a task."""
        assignment.since, assignment.is_deferred = time.monotonic(), False
        self._assignments[assignment.task.ticket] = assignment
        self._line.put(assignment.encoded)

    def receive(self) -> Iterator[tuple[Assignment | None, Any]]:
        """Yield each message that came, with the assignment it settles.

        Raises:
            EOFError: The worker has ended.
        """
        for message in map(FROM_WORKER.decode, self._line.receive()):
            if isinstance(message, Ready):
                self.is_ready = True
            elif isinstance(message, Deferred):
                self._defer(self._assignments[message.ticket])
            elif hasattr(message, "ticket"):
                yield self._settle(message.ticket), message
            else:
                yield None, message

    def _defer(self, assignment: Assignment) -> None:
        assignment.is_deferred, assignment.since = True, time.monotonic()
        self._num_deferred += 1
        self._start_turn()

    def _settle(self, ticket: int) -> Assignment:
        assignment = self._assignments.pop(ticket)
        self._num_deferred -= assignment.is_deferred
        if not assignment.is_deferred:
            self._start_turn()
        return assignment

    def _turn(self) -> Assignment | None:
        return next((each for each in self._assignments.values() if not each.is_deferred), None)

    def _start_turn(self) -> None:
        turn = self._turn()
        if turn is not None:
            turn.since = time.monotonic()

    def deadline(self) -> float:
        """When it is overdue (monotonic seconds); infinity while it owes nothing."""
        if not self.is_ready:
            return self._started + _START_S
        turn = self._turn()
        deadlines = [each.since + each.timeout_s + _GRACE_S for each in self._assignments.values() if each.is_deferred]
        if turn is not None:
            deadlines.append(turn.since + turn.timeout_s)
        return min(deadlines, default=float("inf"))

    def end(self, grace_s: float = 0.0) -> tuple[list[Assignment], list[Assignment], str]:
        """End it, by force unless it has ended or does so within `grace_s`.

        Returns:
            What it may have been working on; what it surely was not; how it ended, in words.
        """
        how = self._line.end(grace_s)
        turn = self._turn()
        suspects = [each for each in self._assignments.values() if each.is_deferred or each is turn]
        others = [each for each in self._assignments.values() if each not in suspects]
        return suspects, others, how
