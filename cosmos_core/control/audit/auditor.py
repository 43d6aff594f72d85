"""Takes a journal's entries in, and compares what the run says of itself with what is on record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from cosmos_core.control.audit.books import Books
from cosmos_core.control.audit.found import Audit, Batch
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import ControllerStarted, Event, Recovered, ReplicaLost, Reported, RunOpened
from cosmos_core.control.machine.invariants import check
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import Generation, RunningStep, State
from cosmos_core.errors import JournalError
from cosmos_core.transport.directives import GroupRef
from cosmos_core.transport.reports import GenerationFormed, GroupFinished, Report, StepDone
from cosmos_core.transport.wire import REPORT

_MAX_PROBLEMS = 100


def audit(entries: Iterable[tuple[int, float, Event]]) -> Audit:
    """Audit a journal: (sequence, unix time, event), in order from its beginning.

    Raises:
        JournalError: It does not begin with the opening or the recovery of a run, or is empty.
    """
    auditor = Auditor()
    for sequence, time, event in entries:
        auditor.take(sequence, time, event)
    return auditor.result()


class Auditor:
    """Takes a journal's entries in, one by one.

    Attributes:
        state: What they lead to; None before the first one.
    """

    def __init__(self) -> None:
        self.state: State | None = None
        self._books: list[Books] = []
        self._batches: list[Batch] = []
        self._first_step = 0
        self._closed_at: dict[int, int] = {}
        self._finished: dict[int, GroupFinished] = {}
        self._used: dict[int, int] = {}
        self._holds: dict[str, int] = {}
        self._problems: list[str] = []
        self._entries = self._starts = self._lost = self._undone = 0

    def take(self, sequence: int, time: float, event: Event) -> None:
        """Take in the next entry.

        Raises:
            JournalError: The first entry neither opens nor recovers a run.
        """
        self._entries += 1
        if isinstance(event, RunOpened | Recovered):
            self._begin(sequence, event)
            return
        state = self.state
        if state is None:
            raise JournalError(f"the journal begins with {type(event).__name__}, not RunOpened: it is another file")
        before = state.step, state.term
        # What held while the step was ordered and trained; with its end, what holds for the next one may change.
        running, generation, settings = state.running, state.generation, state.settings
        received = self._received(event)
        core.step(state, event)
        if isinstance(event, Reported) and self._received(event) > received:
            self._note(event.incarnation, REPORT.decode(event.report))
        self._count(event)
        if isinstance(event, ControllerStarted) and state.term != before[1] + 1:
            self._problem(f"entry {sequence}: term {state.term} follows term {before[1]}")
        if state.step < before[0] or len(state.steps) < len(self._batches) + self._first_step:
            self._rewind(state)
        batch = None
        if state.step > before[0] and running is not None:
            batch = self._close(sequence, time, running, generation, settings)
        for index, (books, ledger) in enumerate(zip(self._books, state.ledgers, strict=True)):
            of_stage = batch if batch is not None and batch.stage == index else None
            for problem in books.move(ledger, of_stage, sequence):
                self._problem(problem)
        if batch is not None:
            self._check(state)

    def result(self) -> Audit:
        """What all entries so far prove.

        Raises:
            JournalError: There were none.
        """
        state = self.state
        if state is None:
            raise JournalError("the journal is empty: the run has not been opened")
        self._check(state)
        for problem in self._totals(state):
            self._problem(problem)
        return Audit(
            run_id=state.settings.run_id,
            entries=self._entries,
            terms=self._starts,
            lost=self._lost,
            stages=tuple(books.found() for books in self._books),
            batches=tuple(self._batches),
            undone=self._undone,
            problems=tuple(self._problems),
        )

    def _begin(self, sequence: int, event: RunOpened | Recovered) -> None:
        if self.state is not None:
            self._problem(f"entry {sequence}: the run begins once more")
        self.state = state = core.begin(event)
        self._first_step = state.step
        self._closed_at = {state.step: sequence}
        self._books = [Books(index, ledger) for index, ledger in enumerate(state.ledgers)]

    def _received(self, event: Event) -> int:
        """Number of the newest report of the process that an event is a report of; -1 if it is not in the run."""
        if not isinstance(event, Reported) or self.state is None:
            return -1
        replica = self.state.replicas.get(event.name)
        return replica.received if replica is not None and replica.incarnation == event.incarnation else -1

    def _count(self, event: Event) -> None:
        self._lost += isinstance(event, ReplicaLost)
        self._starts += isinstance(event, ControllerStarted)

    def _note(self, incarnation: str, report: Report) -> None:
        match report:
            case GroupFinished():
                if report.lease in self._finished:
                    self._problem(f"lease {report.lease} was finished twice")
                self._finished[report.lease] = report
            case StepDone() | GenerationFormed():
                self._holds[incarnation] = report.step
            case _:
                pass

    def _close(
        self, sequence: int, time: float, running: RunningStep, generation: Generation | None, settings: Settings
    ) -> Batch:
        """Book the step that has just been done."""
        state, order = self.state, running.order
        assert state is not None
        members = generation.order.members if generation is not None else ()
        batch = Batch(
            step=order.step,
            stage=order.stage,
            attempt=order.attempt,
            generation=generation.order.generation if generation is not None else running.generation,
            members=members,
            groups=order.groups,
            dropped=dict(running.dropped),
            sequence=sequence,
            time=time,
        )
        if order.step != len(self._batches) + self._first_step + 1:
            self._problem(f"step {order.step} was done after step {len(self._batches) + self._first_step}")
        for name in members:
            replica = state.replicas.get(name)
            if replica is None or self._holds.get(replica.incarnation) != order.step:
                self._problem(f"step {order.step} is done, but {name} has not said that it applied it")
        for group in order.groups:
            for problem in self._unsound(settings, batch, group):
                self._problem(f"step {order.step}, prompt {group.position}: {problem}")
        self._batches.append(batch)
        self._closed_at[order.step] = sequence
        return batch

    def _unsound(self, settings: Settings, batch: Batch, group: GroupRef) -> Iterator[str]:
        """What is wrong with a group that was trained on."""
        row = settings.row_of(group.position, batch.stage)
        if row != group.row:
            yield f"is row {group.row}, but the order of the seed has row {row} there"
        if not settings.stages[batch.stage].uses_rollouts:
            return
        report = self._finished.get(group.lease)
        if report is None:
            yield f"lease {group.lease} was never finished"
            return
        if (other := self._used.setdefault(group.lease, batch.step)) != batch.step:
            yield f"lease {group.lease} was trained on in step {other}, too"
        if [_gist(sample) for sample in group.samples] != [_gist(sample) for sample in report.samples]:
            yield f"its samples are not those that lease {group.lease} was finished with"
        age = batch.step - 1 - min((sample.oldest_version for sample in group.samples), default=batch.step - 1)
        if age > settings.max_staleness:
            yield f"lags by {age} steps, allowed are {settings.max_staleness}"

    def _rewind(self, state: State) -> None:
        """The run went on from an earlier step: what came after it did not happen."""
        kept = max(0, state.step - self._first_step)
        self._undone += len(self._batches) - kept
        del self._batches[kept:]
        closed_at = self._closed_at.get(state.step)
        if closed_at is None:
            self._problem(f"the run went on from step {state.step}, which it had never done")
            closed_at = 0
        self._used = {lease: step for lease, step in self._used.items() if step <= state.step}
        for books, ledger in zip(self._books, state.ledgers, strict=True):
            books.rewind(ledger, closed_at)

    def _totals(self, state: State) -> Iterator[str]:
        for books, ledger in zip(self._books, state.ledgers, strict=True):
            yield from books.differences(ledger)
        recorded = [record.step for record in state.steps]
        if recorded[self._first_step :] != [batch.step for batch in self._batches]:
            yield f"the run has records of {len(recorded)} steps, on record are {len(self._batches)} batches"

    def _check(self, state: State) -> None:
        try:
            check(state)
        except AssertionError as error:
            self._problem(str(error))

    def _problem(self, problem: str) -> None:
        if problem not in self._problems and len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(problem)


def _gist(sample: object) -> tuple[object, ...]:
    """A sample without its words for people, which orders leave out."""
    return tuple(value for name, value in attrs.asdict(sample).items() if name not in ("text", "detail"))  # type: ignore[arg-type]
