"""The figures of a run at one moment, and the timeline that they are derived from.

The terminal, `cosmos status`, its `--watch` and the page all show these. Whoever follows a run feeds a timeline with
each entry of its journal, so that all who show the run derive the same figures.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from cosmos_core.config.job import Stage
from cosmos_core.control.machine import history
from cosmos_core.control.machine.events import (
    ControllerStarted,
    Event,
    Recovered,
    ReplicaJoined,
    Resumed,
    RolledBack,
    RunOpened,
)
from cosmos_core.control.machine.records import EvaluationRecord, StepRecord
from cosmos_core.control.machine.state import State
from cosmos_core.observe.live import Progress

NEWEST_STEPS: Final = 20
_CONTROLLER: Final = "controller"
_WINDOW_S: Final = 10.0
"""A rate is measured over at least so long before it counts as gone."""

Gauges: TypeAlias = Mapping[str, Mapping[str, float]]
"""The newest gauges of each replica by name, and of the controller under `controller`."""


@attrs.frozen(kw_only=True)
class TimedStep:
    """A step, and the unix time at which every policy replica had applied it."""

    time: float
    record: StepRecord
    trained: float
    """Units that all steps trained on up to then."""
    generated: int = 0
    """Units that were generated up to then, if whoever follows the run counts them."""

    @property
    def step(self) -> int:
        """The step's number."""
        return self.record.step

    @property
    def stage(self) -> int:
        """The number of its stage."""
        return self.record.stage


class Timeline:
    """The times of a run: sessions of its controller, ends of steps, processes that came back.

    Attributes:
        steps: Of the newest steps, and of some earlier ones (`history`).
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

    def take(self, time: float, event: Event, state: State, generated: int = 0) -> None:
        """Take an entry in, which the state has taken in; before it, `generated` units were."""
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
            history.undo(self.steps, state.step)
        known = self.steps[-1].step if self.steps else 0
        for record in history.after(state.steps, known):
            timed = TimedStep(time=time, record=record, trained=state.trained_units, generated=generated)
            history.add(self.steps, timed)

    def elapsed_s(self, now: float | None) -> float:
        """Seconds for which the run has gone on since it began or was recovered, without the time between sessions.

        `now` is None for a run that nobody runs now.
        """
        passed = sum(last - first for first, last in self.sessions)
        return passed if now is None or not self.sessions else passed + max(0.0, now - self.sessions[-1][1])

    def newest_steps(self, stage: int) -> list[TimedStep]:
        """The newest steps of a stage that were applied in the newest session."""
        begin = self.sessions[-1][0] if self.sessions else 0.0
        return [timed for timed in self.steps[-NEWEST_STEPS:] if timed.time >= begin and timed.record.stage == stage]

    def is_one_session(self, first: float, last: float) -> bool:
        """True if one session holds both times."""
        return any(begin <= first and last <= end for begin, end in self.sessions)

    def units_per_s(self, steps: Sequence[TimedStep]) -> dict[str, float]:
        """Units that each pool did per second between the ends of steps, waiting included; empty if that is not known.

        What lies between two sessions does not count. The first step only says when the second began.
        """
        pairs = [(a, b) for a, b in itertools.pairwise(steps) if self.is_one_session(a.time, b.time)]
        passed = sum(b.time - a.time for a, b in pairs)
        if passed <= 0:
            return {}
        return {
            "policy": sum(b.trained - a.trained for a, b in pairs) / passed,
            "rollout": sum(b.generated - a.generated for a, b in pairs) / passed,
        }

    def _begin(self) -> None:
        """A controller takes over: for a session that begins, or from another one that was killed."""
        if self._is_begun:
            self.restarts[_CONTROLLER] += 1
            return
        self._is_begun = True
        self.joined.clear()
        self.restarts.clear()


def phase_of(state: State, stage: Stage) -> str:
    """The phase of the run, in a few words; `stage` is that of its next step."""
    evaluates_first = state.pending and state.running is None and state.step <= stage.first_step
    phases = (
        (bool(state.outcome), state.outcome),
        (state.is_stopping, "stopping"),
        (not state.has_started, "starting"),
        (state.is_trained, "last evaluation" if state.pending else "last checkpoint"),
        (stage.key == "warmup", "warm-up"),
        (bool(evaluates_first), "evaluating"),
    )
    return next((phase for holds, phase in phases if holds), "training")


def figures(
    state: State, timeline: Timeline, stages: tuple[Stage, ...], gauges: Gauges, *, now: float | None
) -> Progress:
    """The figures of a run; `now` is None for a run that nobody runs now, which has no pace."""
    stage = stages[state.stage_index]
    records = [record for record in state.steps[-NEWEST_STEPS:] if record.stage == stage.index]
    rewarded = [record for record in records if record.reward is not None]
    newest = timeline.newest_steps(stage.index)
    scored, measured = _newest(state, of_rollouts=True), _newest(state, of_rollouts=False)
    uses_rollouts = state.settings.stages[stage.index].uses_rollouts
    is_last = stage.index == len(stages) - 1
    is_running = now is not None and not state.outcome
    return Progress(
        phase=phase_of(state, stage),
        step=state.step,
        num_steps=stages[-1].last_step,
        stage=stage.label,
        elapsed_s=timeline.elapsed_s(None if state.has_ended else now),
        reward=sum(record.reward or 0.0 for record in rewarded) / len(rewarded) if rewarded else None,
        accuracy=scored.accuracy if scored else None,
        heldout_reward=scored.score if scored and scored.accuracy is None else None,
        evaluated_step=scored.version if scored else None,
        unscored=scored.unscored if scored else "",
        heldout_loss=measured.loss if measured else None,
        measured_step=measured.version if measured else None,
        staleness_mean=sum(record.staleness_mean for record in rewarded) / len(rewarded) if rewarded else None,
        policy_units_per_s=_trained_per_s(timeline, newest, now) if now is not None else None,
        rollout_units_per_s=_generated_per_s(state, gauges) if is_running else None,
        dropped=sum(sum(ledger.dropped.values()) for ledger in state.ledgers),
        queued=len(state.ledger.finished) + len(state.ledger.batched) if uses_rollouts else None,
        in_flight=len(state.ledger.in_flight) if uses_rollouts else None,
        restarts=timeline.restarts.total(),
        eta_s=_eta(newest, stage) if is_running and is_last else None,
        unit=state.settings.unit,
    )


def _newest(state: State, *, of_rollouts: bool) -> EvaluationRecord | None:
    """The newest evaluation of rollouts, or of demonstrations."""
    return next((done for done in reversed(state.evaluations) if done.is_of_rollouts == of_rollouts), None)


def _trained_per_s(timeline: Timeline, newest: list[TimedStep], now: float) -> float | None:
    """Units trained per second; None once no step has ended for as long as the rate is measured over."""
    if not newest or now - newest[-1].time > max(_WINDOW_S, newest[-1].time - newest[0].time):
        return None
    return timeline.units_per_s(newest).get("policy")


def _generated_per_s(state: State, gauges: Gauges) -> float | None:
    """Units that rollout replicas generate per second, by their own words."""
    rates = [gauges.get(name, {}).get("units_per_s") for name in state.members["rollout"]]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _eta(newest: list[TimedStep], stage: Stage) -> float | None:
    """Seconds to the stage's end at the pace of its newest steps."""
    if len(newest) < 2:
        return None
    pace = (newest[-1].time - newest[0].time) / (len(newest) - 1)
    return pace * max(0, stage.last_step - newest[-1].record.step)
