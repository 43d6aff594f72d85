"""Folds the events of a run's journal into a state, with the times at which things happened.

The live view, the hooks, the summary and the report are all derived from this, so none of them can disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from cosmos_core.config.job import Stage, Unit
from cosmos_core.control.live.figures import Gauges, TimedStep, Timeline, figures
from cosmos_core.control.live.time_spent import TimeSpent
from cosmos_core.control.machine import changes, core, history
from cosmos_core.control.machine.events import (
    ControllerStarted,
    Event,
    Recovered,
    ReplicaJoined,
    ReplicaLost,
    Reported,
    Resumed,
    RolledBack,
    RunEnded,
    RunOpened,
)
from cosmos_core.control.machine.records import EvaluationRecord, StepRecord
from cosmos_core.control.machine.state import State
from cosmos_core.errors import JournalError
from cosmos_core.observe.live import Progress
from cosmos_core.transport.reports import REPORT, CheckpointSaved, GroupFinished, WeightsLoaded, WeightsPublished

Notify = Callable[..., None]
"""Called as `notify(hook, **arguments)` for each thing that happened."""


def ignore(hook: str, **arguments: Any) -> None:
    """A `Notify` for nobody."""


class Follower:
    """Folds journal entries.

    Attributes:
        loads: Sums over the weight loads of rollout replicas: how many, how many by difference, and their bytes.
        spent: Seconds by activity.
        generated: Units that were generated, of evaluations and of what was undone since, too.
        last_sequence: Sequence number of the newest entry; 0 before any.
    """

    def __init__(self) -> None:
        self.state: State | None = None
        self.timeline: Final = Timeline()
        self.loads: Counter[str] = Counter()
        self.spent: Final = TimeSpent()
        self.has_ended = False
        self.num_resumed = 0
        self.last_sequence = 0
        self._num_changes = 0
        self._num_evaluations = 0
        self._told: Final[dict[str, int]] = {}
        self._received: Final[dict[str, int]] = {}
        self.generated = 0

    @property
    def steps(self) -> list[TimedStep]:
        """Applied steps of the effective timeline, in order: the newest, and some of earlier ones (`history`)."""
        return self.timeline.steps

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """Finished evaluations of the effective timeline, in order."""
        return self.state.evaluations if self.state is not None else []

    def fold(self, entries: Iterable[tuple[int, float, Event]], notify: Notify = ignore) -> None:
        """Apply entries (sequence, unix time, event), in order; those that were applied before are passed over."""
        for sequence, time, event in entries:
            if sequence > self.last_sequence:
                self._apply(sequence, time, event, notify)
                self.last_sequence = sequence

    def _apply(self, sequence: int, time: float, event: Event, notify: Notify) -> None:
        if isinstance(event, RunOpened | Recovered):
            self.state = core.begin(event)
            # Trackers know them already; when they happened, only the journal that is lost did.
            self.timeline.take(time, event, self.state)
            self._num_evaluations = len(self.state.evaluations)
            self._num_changes = len(self.state.changes)
            return
        state = self.state
        if state is None:
            raise JournalError(
                f"the journal's entry {sequence} is {type(event).__name__}, but no run was opened before"
            )
        left = state.replicas.get(event.name) if isinstance(event, ReplicaLost | Reported) else None
        self.spent.take(time, event, state)
        before = state.step
        core.step(state, event)
        self.timeline.take(time, event, state, self.generated)
        if isinstance(event, ControllerStarted):
            self.has_ended = False
        self.num_resumed += isinstance(event, Resumed)
        if isinstance(event, Resumed | RolledBack):
            # What the resumed timeline does not hold.
            self._num_evaluations = len(state.evaluations)
            self._num_changes = len(state.changes)
            self._told.clear()
            self.has_ended = False
        self._count(event, notify)
        self._settings(state, notify)
        self._records(state, before, notify)
        self._membership(event, left.role if left else "", notify)

    def _count(self, event: Event, notify: Notify) -> None:
        if isinstance(event, RunEnded):
            self.has_ended = True
        if not isinstance(event, Reported) or event.sequence <= self._received.get(event.incarnation, 0):
            return
        self._received[event.incarnation] = event.sequence
        report = REPORT.decode(event.report)
        self.spent.take_report(event.incarnation, report)
        if isinstance(report, GroupFinished):
            self.generated += sum(sample.num_units for sample in report.samples)
        elif isinstance(report, WeightsLoaded):
            self.loads.update(
                loads=1,
                bytes=report.nbytes,
                relayed_bytes=report.relayed,
                spared_bytes=report.spared,
                delta_loads=report.spared > 0,
            )
        elif isinstance(report, WeightsPublished) and self._is_first("published", report.version):
            notify("cosmos_weights_published", version=report.version, digest=report.digest)
        elif isinstance(report, CheckpointSaved) and self._is_first("saved", report.step):
            notify("cosmos_checkpoint_saved", step=report.step, path=report.path)

    def _is_first(self, what: str, number: int) -> bool:
        """True if this is told for the first time: every policy replica reports what all of them did, in order."""
        is_first = number > self._told.get(what, -1)
        self._told[what] = max(number, self._told.get(what, -1))
        return is_first

    def _settings(self, state: State, notify: Notify) -> None:
        for change in state.changes[self._num_changes :]:
            step = changes.first_step(state.settings, change.key, change.step)
            notify("cosmos_setting_changed", step=step, key=change.key, before=change.before, after=change.after)
        self._num_changes = len(state.changes)

    def _records(self, state: State, before: int, notify: Notify) -> None:
        for step in history.after(state.steps, before):
            self.spent.take_step(step.metrics)
            notify("cosmos_step_finished", step=step.step, metrics=step_metrics(step))
        for evaluation in state.evaluations[self._num_evaluations :]:
            metrics = evaluation_metrics(evaluation, state.settings.unit)
            notify("cosmos_evaluation_finished", step=evaluation.version, metrics=metrics)
        self._num_evaluations = len(state.evaluations)

    def _membership(self, event: Event, role: str, notify: Notify) -> None:
        if isinstance(event, ReplicaJoined):
            notify("cosmos_replica_joined", replica=event.name, role=event.role)
        elif isinstance(event, Reported) and role and self.state is not None and event.name in self.state.departed:
            notify("cosmos_replica_left", replica=event.name, role=role, reason="drained")
        elif isinstance(event, ReplicaLost):
            notify("cosmos_replica_left", replica=event.name, role=role, reason=event.reason)


def step_metrics(step: StepRecord) -> dict[str, float]:
    """Everything about a step as numbers, for trackers."""
    metrics: dict[str, float] = {f"train/{name}": value for name, value in step.metrics.items()}
    metrics["batch/groups"] = step.num_groups
    metrics["batch/samples"] = step.num_samples
    metrics["step/attempt"] = step.attempt
    metrics["step/skipped"] = float(step.skipped)
    if step.reward is not None:
        metrics["reward/mean"] = step.reward
        metrics["batch/units"] = step.num_units
        metrics["batch/truncated"] = step.truncated
        metrics["staleness/mean"] = step.staleness_mean
        metrics["staleness/max"] = step.staleness_max
    metrics |= _prefixed("setting", {key: float(v) for key, v in step.settings.items() if isinstance(v, int | float)})
    metrics |= _prefixed("reward", step.rewards)
    metrics |= _prefixed("failed", step.failed)
    return metrics | _prefixed("dropped", step.dropped)


def evaluation_metrics(done: EvaluationRecord, unit: Unit) -> dict[str, float]:
    """Everything about an evaluation as numbers, for trackers.

    Only a loss of tokens is a log-probability, and has a perplexity.
    """
    figures: dict[str, float | None] = {"accuracy": done.accuracy, "reward": done.reward, "loss": done.loss}
    if done.is_of_rollouts:
        figures |= {"unscored": done.num_unscored, "truncated": done.num_truncated}
    else:
        perplexity = done.perplexity if unit == "token" else None
        figures |= {"units": done.num_units, "unusable": done.num_unscored, "perplexity": perplexity}
    return _prefixed("heldout", {name: value for name, value in figures.items() if value is not None})


def _prefixed(prefix: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in numbers.items()}


WAITING: Final = "waiting for the controller"
"""The phase of a run whose controller is not heard, and may be again."""


def progress_of(follower: Follower, stages: tuple[Stage, ...], gauges: Gauges, *, now: float | None) -> Progress:
    """The newest progress.

    `now` is unix time, None for a run that nobody runs now.
    """
    if follower.state is None:
        return starting(stages, 0, elapsed_s=0.0)
    return figures(follower.state, follower.timeline, stages, gauges, now=now)


def waiting(follower: Follower, stages: tuple[Stage, ...], *, heard: float) -> Progress:
    """Progress while the controller is not heard: without paces, which are of before, and the clock stands.

    `heard` is the unix time at which it was heard last.
    """
    known = progress_of(follower, stages, {}, now=None)
    return attrs.evolve(known, phase=WAITING, elapsed_s=follower.timeline.elapsed_s(heard))


def starting(stages: tuple[Stage, ...], step: int, *, elapsed_s: float) -> Progress:
    """Progress before anything is known of this session: figures of an earlier one would look like this one's.

    `step` is where the session goes on from, `elapsed_s` how long the run went on before.
    """
    stage = next((stage for stage in stages if step < stage.last_step), stages[-1])
    last_step = stages[-1].last_step
    return Progress(phase="starting", step=step, num_steps=last_step, stage=stage.label, elapsed_s=elapsed_s)


def waits_for(state: State | None) -> str:
    """The event that a requested stop waits for."""
    if state is None or not state.has_started:
        return "the replicas to start"
    if state.running is not None:
        return f"step {state.running.order.step} to be applied, and its checkpoint"
    return f"a checkpoint of step {state.step}"


def unsaved(state: State | None) -> str:
    """Words about the steps that a kill would undo, to end a sentence; empty if there are none."""
    newest = max(state.checkpoints.kept, default=0) if state is not None else 0
    return f"; steps {newest + 1} to {state.step} are in no checkpoint" if state and state.step > newest else ""
