"""The event feed: recent news in words, samples and curves. Cheap to keep, bounded whatever the run does."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

import attrs

from cosmos_core.control.machine import history
from cosmos_core.control.machine.events import (
    Commanded,
    ControllerStarted,
    Event,
    ReplicaJoined,
    ReplicaLost,
    Reported,
    Resumed,
    RolledBack,
)
from cosmos_core.control.machine.records import EvaluationRecord, StepRecord
from cosmos_core.control.machine.recovery import since_recovery
from cosmos_core.control.machine.state import State
from cosmos_core.errors import TransportError
from cosmos_core.observe.live import bracketed
from cosmos_core.transport.messages import REQUEST, Request, Stop
from cosmos_core.transport.reports import REPORT, GroupFinished

MOST_POINTS: Final = 512
"""Of one curve; even, because neighbours are merged in pairs."""

Point = tuple[float, float]


@attrs.frozen(kw_only=True)
class Curve:
    """A curve as it was at one moment: (step, value), steps ascending."""

    name: str
    points: tuple[Point, ...]


class Trace:
    """A curve that grows: when it is full, neighbours are averaged, so that noise stays honest."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self._points: list[Point] = []
        self._stride = 1
        self._part: list[Point] = []

    def add(self, step: float, value: float) -> None:
        """Add a point."""
        self._part.append((step, value))
        if len(self._part) == self._stride:
            self._points.append(_mean(self._part))
            self._part.clear()
        if len(self._points) == MOST_POINTS:
            self._points = [_mean(self._points[first : first + 2]) for first in range(0, MOST_POINTS, 2)]
            self._stride *= 2

    def curve(self) -> Curve:
        """The curve as it is now, the newest points included."""
        newest = (_mean(self._part),) if self._part else ()
        return Curve(name=self.name, points=(*self._points, *newest))


def _mean(points: list[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


_MOST_NEWS: Final = 100
_MOST_SAMPLES: Final = 12
_MOST_REPORTS: Final = 24
"""Newest reports that are kept until somebody looks; what they changed is in the state, they are for samples only."""
_MOST_LOST: Final = 20
_NEWEST_STEPS: Final = 20
MOST_TEXT: Final = 2000
_METRICS: Final = (("loss", "loss"), ("mismatch", "mismatch_kl"), ("behaviour", "behaviour_kl"), ("entropy", "entropy"))
"""Curves, and the metrics of a step that they show; those of a warm-up are curves of their own."""


@attrs.frozen(kw_only=True)
class News:
    """Something that happened: a unix time, a word for its kind, and what it was."""

    time: float
    kind: str
    text: str


@attrs.frozen(kw_only=True)
class SampleView:
    """A sample that a model made. The text is the model's own: whoever shows it has to escape it.

    Attributes:
        lease: By which its group is found among the kept samples.
        replica: Who generated it.
        version: The oldest weights that did.
        reward: None where it was not scored.
        text: The completion, or the prompt of what is no text; at most `MOST_TEXT` characters.
    """

    time: float
    lease: int
    replica: str
    version: int
    status: str
    reward: float | None
    units: int
    text: str


class EventFeed:
    """Takes events as they come and looks now and then at what the state has come to; newest last in each list."""

    def __init__(self) -> None:
        self.news: Final[deque[News]] = deque(maxlen=_MOST_NEWS)
        self.samples: Final[deque[SampleView]] = deque(maxlen=_MOST_SAMPLES)
        self.lost: Final[deque[ReplicaLost]] = deque(maxlen=_MOST_LOST)
        self._reports: Final[deque[tuple[float, Reported]]] = deque(maxlen=_MOST_REPORTS)
        self._traces: Final[dict[str, Trace]] = {}
        self._ages: Final[deque[dict[int, int]]] = deque(maxlen=_NEWEST_STEPS)
        self._seen: _Seen | None = None

    def note(self, event: Event, time: float) -> None:
        """Take an event in; called for each one, so it only keeps what it needs."""
        match event:
            case Reported():
                self._reports.append((time, event))
            case ReplicaJoined():
                for lost in [lost for lost in self.lost if lost.name == event.name]:
                    self.lost.remove(lost)
                self._say(time, "joined", f"{event.name} (pid {event.pid} on {event.host})")
            case ReplicaLost():
                self.lost.append(event)
                self._say(time, "left", f"{event.name}: {event.reason}")
            case Commanded():
                self._say(time, "asked", _asked(event))
            case ControllerStarted():
                self._say(time, "controller", f"started, term {since_recovery(event.term)}")
            case Resumed():
                self._seen = None
                self._say(time, "resumed", f"from step {event.step}")
            case RolledBack():
                self._seen = None
                self._say(time, "rolled-back", f"to step {event.step}: all policy replicas were lost")
            case _:
                pass

    def catch_up(self, state: State, time: float) -> None:
        """Take in what the state has come to since this was called last."""
        seen = self._seen
        if seen is None:
            seen = self._begin(state)
        for record in history.after(state.steps, seen.step):
            self._on_step(record, state, time)
        for evaluation in state.evaluations[seen.num_evaluations :]:
            self._on_evaluation(evaluation, time)
        now = _Seen.of(state)
        for kind, text in seen.differences(now):
            self._say(time, kind, text)
        self._seen = now
        self._take_samples()

    def curves(self) -> tuple[Curve, ...]:
        """Every curve that has a point, as it is now."""
        return tuple(trace.curve() for trace in self._traces.values())

    def staleness(self) -> dict[int, int]:
        """Samples of the newest steps by how many steps the weights that made them lagged those they trained."""
        return dict(sorted(sum(map(Counter, self._ages), Counter()).items()))

    def _begin(self, state: State) -> _Seen:
        """Curves of what was before, of which no more is known than the records."""
        self._traces.clear()
        self._ages.clear()
        for record in state.steps:
            self._plot(record, state)
        for evaluation in state.evaluations:
            self._plot_evaluation(evaluation)
        return _Seen.of(state)

    def _on_step(self, record: StepRecord, state: State, time: float) -> None:
        self._plot(record, state)
        if record.skipped:
            self._say(
                time, "skipped", f"step {record.step}: its gradient was not finite, the weights stay as they were"
            )
        if record.attempt > 1:
            self._say(time, "repeated", f"step {record.step} was applied at attempt {record.attempt}")

    def _plot(self, record: StepRecord, state: State) -> None:
        stage = "" if state.settings.stages[record.stage] is state.settings.main else "warm-up "
        if record.ages:
            self._ages.append(record.ages)
        self._trace("reward", record.step, record.reward)
        for name, metric in _METRICS:
            self._trace(stage + name, record.step, record.metrics.get(metric))
        if record.reward is not None:
            self._trace("staleness", record.step, record.staleness_mean)

    def _on_evaluation(self, record: EvaluationRecord, time: float) -> None:
        self._plot_evaluation(record)
        if record.loss is not None:
            found = f"held-out loss {record.loss:.4f}"
        elif record.score is not None:
            found = f"{_scored(record)} {record.score:.3f}{bracketed(record.unscored)}"
        else:
            found = f"not measured, as none of {record.num_prompts} held-out prompts was scored"
        self._say(time, "evaluated", f"weights of step {record.version}: {found}")

    def _plot_evaluation(self, record: EvaluationRecord) -> None:
        self._trace(_scored(record), record.version, record.score)
        self._trace("held-out loss", record.version, record.loss)

    def _trace(self, name: str, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._traces.setdefault(name, Trace(name)).add(step, value)

    def _take_samples(self) -> None:
        for time, event in self._reports:
            report = REPORT.decode(event.report)
            for sample in report.samples[:1] if isinstance(report, GroupFinished) else ():
                shown = SampleView(
                    time=time,
                    lease=report.lease,
                    replica=event.name,
                    version=sample.oldest_version,
                    status=sample.status,
                    reward=sample.reward,
                    units=sample.num_units,
                    text=report.text[:MOST_TEXT],
                )
                self.samples.append(shown)
        self._reports.clear()

    def _say(self, time: float, kind: str, text: str) -> None:
        self.news.append(News(time=time, kind=kind, text=text[:MOST_TEXT]))


@attrs.frozen(kw_only=True)
class _Seen:
    """Facts that were known of a state, to tell what is new in it."""

    step: int
    num_evaluations: int
    generation: int
    members: tuple[str, ...]
    target: int
    outcome: str
    reason: str
    dropped: dict[str, int]
    saved: frozenset[int]
    failed: dict[int, str]
    problems: dict[str, str]
    departed: frozenset[str]

    @classmethod
    def of(cls, state: State) -> _Seen:
        generation = state.generation
        # What is counted is told ever less often.
        counted = {what: f"{1 << number.bit_length() - 1:,} or more" for what, number in state.troubles.items()}
        return cls(
            step=state.step,
            num_evaluations=len(state.evaluations),
            generation=state.generation_number,
            members=generation.order.members if generation is not None else (),
            target=state.target,
            outcome=state.outcome,
            reason=state.reason,
            dropped=dict(sum((Counter(ledger.dropped) for ledger in state.ledgers), Counter())),
            saved=frozenset(state.checkpoints.saved),
            failed=dict(state.checkpoints.failed),
            problems=state.status_details | counted,
            departed=frozenset(state.departed),
        )

    def differences(self, now: _Seen) -> Iterator[tuple[str, str]]:
        """(kind, text) of what has changed since."""
        yield from self._drops(now)
        for name in sorted(now.departed - self.departed):
            yield "left", f"{name}, as it was asked to"
        if now.generation != self.generation:
            yield "generation", f"{since_recovery(now.generation)}: {', '.join(now.members) or 'nobody yet'}"
        for step in sorted(now.saved - self.saved):
            yield "checkpoint", f"of step {step}"
        yield from self._problems(now)
        if now.outcome != self.outcome:
            yield "ended", " ".join(filter(None, (now.outcome, now.reason)))

    def _drops(self, now: _Seen) -> Iterator[tuple[str, str]]:
        for reason, count in now.dropped.items():
            new = count - self.dropped.get(reason, 0)
            if new > 0:
                words = "1 prompt" if new == 1 else f"{new:,} prompts"
                is_stale = reason == "stale"
                yield ("stale", f"{words} too old to train on") if is_stale else ("dropped", f"{words}: {reason}")

    def _problems(self, now: _Seen) -> Iterator[tuple[str, str]]:
        for step, why in now.failed.items():
            if self.failed.get(step) != why:
                yield "problem", f"no checkpoint of step {step}: {why}"
        for kind, detail in now.problems.items():
            if self.problems.get(kind) != detail and kind != "checkpoint":
                yield "problem", f"{kind}: {detail}"


def _scored(record: EvaluationRecord) -> str:
    """The name of the score of rollouts."""
    return "held-out reward" if record.accuracy is None else "held-out accuracy"


def _asked(event: Commanded) -> str:
    try:
        return words_of(REQUEST.decode(event.request))
    except TransportError as error:
        return f"something that cannot be read: {error}"


def words_of(request: Request) -> str:
    """A request in words: its name and what it says."""
    if isinstance(request, Stop):
        return "stop"
    said = [
        " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for value in attrs.asdict(request, recurse=False).values()
    ]
    return " ".join((type(request).__name__.lower(), *said))
