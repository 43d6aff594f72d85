"""When things happened in a run: sessions of its controller, ends of steps, processes that came back.

Whoever follows a run feeds one with each entry of its journal, so that all who show the run derive the same figures.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.control.machine.events import (
    ControllerStarted,
    Event,
    Recovered,
    ReplicaJoined,
    Resumed,
    RolledBack,
    RunOpened,
)
from cosmos_core.control.machine.records import StepRecord
from cosmos_core.control.machine.state import State

_NEWEST: Final = 20
_CONTROLLER: Final = "controller"


@attrs.frozen(kw_only=True)
class TimedStep:
    """A step, and the unix time at which every policy replica had applied it."""

    time: float
    record: StepRecord


class Timeline:
    """Takes a journal's entries in, in order.

    Attributes:
        steps: Applied steps that the run has, in order.
        sessions: (first, last) unix time of each term of the controller.
        joined: Unix time at which each replica joined first since the run was started or resumed last.
        restarts: How often each replica, and the controller, came back since then in another process.
        is_recovered: Whether the journal is not the run's first, so that nothing is known of sessions before it.
    """

    def __init__(self) -> None:
        self.steps: list[TimedStep] = []
        self.sessions: list[tuple[float, float]] = []
        self.joined: dict[str, float] = {}
        self.restarts: Counter[str] = Counter()
        self.is_recovered = False
        self._is_begun = False

    def take(self, time: float, event: Event, state: State) -> None:
        """Take an entry in.

        Args:
            time: Unix time of the entry.
            event: What happened.
            state: The run's, which has taken it in; only read.
        """
        match event:
            case RunOpened() | Recovered():
                self.steps.clear()
                self.is_recovered = isinstance(event, Recovered)
            case ControllerStarted():
                self.sessions.append((time, time))
                self._begin()
            case Resumed():
                self._is_begun = False
            case ReplicaJoined():
                self.restarts[event.name] += event.name in self.joined
                self.joined.setdefault(event.name, time)
            case _:
                pass
        if self.sessions and not isinstance(event, Resumed):
            self.sessions[-1] = (self.sessions[-1][0], time)
        if isinstance(event, Resumed | RolledBack):
            del self.steps[len(state.steps) :]
        self.steps += [TimedStep(time=time, record=record) for record in state.steps[len(self.steps) :]]

    def elapsed_s(self, now: float | None) -> float:
        """Seconds for which the run has gone on since it began or was recovered, without the time between sessions.

        Args:
            now: Unix time; None for a run that nobody runs now.
        """
        passed = sum(last - first for first, last in self.sessions)
        return passed if now is None or not self.sessions else passed + max(0.0, now - self.sessions[-1][1])

    def newest_steps(self, stage: int) -> list[TimedStep]:
        """The newest steps of a stage that were applied in the newest session."""
        begin = self.sessions[-1][0] if self.sessions else 0.0
        return [timed for timed in self.steps[-_NEWEST:] if timed.time >= begin and timed.record.stage == stage]

    def is_one_session(self, first: float, last: float) -> bool:
        """True if one session holds both times."""
        return any(begin <= first and last <= end for begin, end in self.sessions)

    def trained_per_s(self, steps: Sequence[TimedStep]) -> float | None:
        """Units that steps trained on per second between their ends, waiting included; None where that is not known.

        What lies between two sessions does not count.

        Args:
            steps: Of this timeline, in order; the first only says when the second began.
        """
        pairs = [(a, b) for a, b in itertools.pairwise(steps) if self.is_one_session(a.time, b.time)]
        passed = sum(b.time - a.time for a, b in pairs)
        return sum(trained_units(b.record) for _, b in pairs) / passed if passed > 0 else None

    def _begin(self) -> None:
        """A controller takes over: for a session that begins, or from another one that was killed."""
        if self._is_begun:
            self.restarts[_CONTROLLER] += 1
            return
        self._is_begun = True
        self.joined.clear()
        self.restarts.clear()


def trained_units(step: StepRecord) -> float:
    """Units that a step trained on: the trainer's own count if it gives one, else those that were generated."""
    return step.metrics.get("units", float(step.num_units))
