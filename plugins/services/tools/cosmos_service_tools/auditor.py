"""The audit of a journal: what became of every prompt, and what each step was trained on.

The state machine says what happened; the counts here are kept apart from it, from the events and the moves of single
prompts, so that a mistake in its accounting is found. It takes one entry after another and works in a simulation, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import ControllerStarted, Event, Recovered, ReplicaLost, Reported, RunOpened
from cosmos_core.control.machine.invariants import check
from cosmos_core.control.machine.ledger import Ledger
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import Generation, RunningStep, State
from cosmos_core.control.recovery_snapshots import require_known
from cosmos_core.errors import JournalError
from cosmos_core.run.address import find_address
from cosmos_core.run.observer import so_far
from cosmos_core.transport.directives import GroupRef
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.reports import REPORT, GenerationFormed, GroupFinished, Report, StepDone
from cosmos_core.types import Sample


@attrs.frozen(kw_only=True)
class Batch:
    """The batch that one step was trained on.

    Attributes:
        attempt: How many times it was ordered.
        generation: The gradient group that applied it.
        groups: What was ordered: prompts, rows, leases, and how each sample ended.
        dropped: Demonstrations of it that could not be used, by position, and why.
        sequence: The journal's entry with which it was done.
    """

    step: int
    stage: int
    attempt: int
    generation: int
    members: tuple[str, ...]
    groups: tuple[GroupRef, ...]
    dropped: Mapping[int, str]
    sequence: int
    time: float


@attrs.frozen(kw_only=True)
class StageAudit:
    """The prompts of a stage.

    Attributes:
        given_out: Positions of the stream that were ever touched, from 0 on.
        live: Queued, in flight, finished or batched when the journal ends.
        before: Of all of these, those that ended before the journal began: it was recovered.
    """

    given_out: int
    consumed: int
    dropped: Mapping[str, int]
    live: int
    before: int


@attrs.frozen(kw_only=True)
class Audit:
    """The result of an audit: everything that a journal proves.

    Attributes:
        terms: Starts of the controller that are on record.
        lost: How often a replica was lost.
        undone: Steps that were applied and then given up, because the run went on from an earlier checkpoint.
        outcome: `finished`, `stopped` or `failed`; empty while the run goes on.
        problems: What does not add up; none: each prompt was consumed once, or dropped with a reason, or is live.
    """

    run_id: str
    entries: int
    terms: int
    lost: int
    stages: tuple[StageAudit, ...]
    batches: tuple[Batch, ...]
    undone: int
    outcome: str
    problems: tuple[str, ...]


@attrs.frozen(kw_only=True)
class _Fate:
    """The end of one prompt: the step that consumed it, or the reason it was dropped for; exactly one of them."""

    step: int | None = None
    reason: str = ""
    sequence: int


class PromptHistory:
    """Follows the prompts of a stage, one by one, from its ledger as the journal begins."""

    def __init__(self, stage: int, ledger: Ledger) -> None:
        self._stage: Final = stage
        self._fates: dict[int, _Fate] = {}
        self._live = set(_live(ledger))
        self._given_out = ledger.next_position
        self._before: Final = ledger.consumed + ledger.num_dropped
        self._consumed_before: Final = ledger.consumed
        self._drops_before: Final = dict(ledger.dropped)
        self._drops = Counter(self._drops_before)

    def move(self, ledger: Ledger, batch: Batch | None, sequence: int) -> Iterator[str]:
        """Record the prompts that were given out or came to their end by a journal's entry; yields what cannot be.

        The batch is of a step of the stage that the entry has done, if it has.
        """
        if ledger.next_position > self._given_out:
            self._live.update(range(self._given_out, ledger.next_position))
            self._given_out = ledger.next_position
        if ledger.consumed + ledger.num_dropped == self._before + len(self._fates):
            return
        now = set(_live(ledger))
        trained = {group.position for group in batch.groups} - batch.dropped.keys() if batch is not None else set()
        for position in sorted(self._live - now):
            if position in self._fates:
                yield f"stage {self._stage}, prompt {position}: came to an end twice"
            if position in trained and batch is not None:
                self._fates[position] = _Fate(step=batch.step, sequence=sequence)
                continue
            said = batch.dropped.get(position, "") if batch is not None else ""
            # Beyond the first ones, reasons are counted together (`records.count_dropped`).
            reason = said if said in ledger.dropped else self._risen(ledger)
            self._fates[position] = _Fate(reason=reason, sequence=sequence)
            self._drops[reason] += 1
            if not reason:
                yield f"stage {self._stage}, prompt {position}: was dropped without a reason"
        for position in sorted(now & self._fates.keys()):
            yield f"stage {self._stage}, prompt {position}: came back from its end"
        self._live = now

    def roll_back(self, ledger: Ledger, closed_at: int) -> None:
        """Forget what came after an entry: the run went on from there, with this ledger."""
        self._fates = {at: fate for at, fate in self._fates.items() if fate.sequence <= closed_at}
        self._drops = Counter(self._drops_before)
        self._drops.update(fate.reason for fate in self._fates.values() if fate.step is None)
        self._live = set(_live(ledger))
        self._given_out = ledger.next_position

    def differences(self, ledger: Ledger) -> Iterator[str]:
        """The differences between this history and the run's own counts."""
        name, ended, live = f"stage {self._stage}", self._fates.keys(), set(_live(ledger))
        if both := sorted(ended & live):
            yield f"{name}: prompts {both} have ended and are live"
        accounted = self._before + len(ended) + len(live)
        if accounted != ledger.next_position:
            yield f"{name}: {ledger.next_position} prompts were given out, {accounted} are accounted for"
        if self._consumed() != ledger.consumed:
            yield f"{name}: the run counts {ledger.consumed} consumed prompts, on record are {self._consumed()}"
        if dict(self._drops) != {reason: number for reason, number in ledger.dropped.items() if number}:
            yield f"{name}: the run counts the drops {ledger.dropped}, on record are {dict(self._drops)}"

    def found(self) -> StageAudit:
        """The fate of the stage's prompts."""
        return StageAudit(
            given_out=self._given_out,
            consumed=self._consumed(),
            dropped=dict(self._drops),
            live=len(self._live),
            before=self._before,
        )

    def _risen(self, ledger: Ledger) -> str:
        """A reason for which the run counts more drops than are on record, the newest; empty if there is none."""
        reasons = reversed(ledger.dropped.items())
        return next((reason for reason, number in reasons if reason and number > self._drops[reason]), "")

    def _consumed(self) -> int:
        return self._consumed_before + sum(fate.step is not None for fate in self._fates.values())


def _live(ledger: Ledger) -> tuple[int, ...]:
    return (*ledger.queued, *ledger.in_flight, *ledger.finished, *ledger.batched)


_MAX_PROBLEMS = 100


def audit_run(directory: Path) -> Audit:
    """Audit the journal of a run, its controller's or the one in its folder, as far as it has come."""
    job = load_job(directory)
    address = find_address(job)
    if address is not None:
        return audit(so_far(address, job.run_id, person_key(job.keys)))
    if not job.journal.exists():
        require_known(job.recovery_snapshots, None)
    auditor = Auditor()
    for entry in entries(job.journal):
        auditor.take(*entry)
    require_known(job.recovery_snapshots, auditor.state)
    return auditor.result()


def audit(found: Iterable[tuple[int, float, Event]]) -> Audit:
    """Audit a journal: (sequence, unix time, event), in order from its beginning."""
    auditor = Auditor()
    for sequence, time, event in found:
        auditor.take(sequence, time, event)
    return auditor.result()


class Auditor:
    """Takes a journal's entries in, one by one."""

    def __init__(self) -> None:
        self.state: State | None = None
        self._histories: list[PromptHistory] = []
        self._batches: list[Batch] = []
        self._first_step = 0
        self._closed_at: dict[int, int] = {}
        self._finished: dict[int, GroupFinished] = {}
        self._used: dict[int, int] = {}
        self._holds: dict[str, int] = {}
        self._problems: list[str] = []
        self._entries = self._starts = self._lost = self._undone = 0

    def take(self, sequence: int, time: float, event: Event) -> None:
        """Take in the next entry."""
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
        if state.step < before[0] or state.step < len(self._batches) + self._first_step:
            self._roll_back(state)
        batch = None
        if state.step > before[0] and running is not None:
            batch = self._close(sequence, time, running, generation, settings)
        for index, (history, ledger) in enumerate(zip(self._histories, state.ledgers, strict=True)):
            of_stage = batch if batch is not None and batch.stage == index else None
            for problem in history.move(ledger, of_stage, sequence):
                self._problem(problem)
        if batch is not None:
            self._check(state)

    def result(self) -> Audit:
        """The result of all entries so far."""
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
            stages=tuple(history.found() for history in self._histories),
            batches=tuple(self._batches),
            undone=self._undone,
            outcome=state.outcome,
            problems=tuple(self._problems),
        )

    def _begin(self, sequence: int, event: RunOpened | Recovered) -> None:
        if self.state is not None:
            self._problem(f"entry {sequence}: the run begins once more")
        self.state = state = core.begin(event)
        self._first_step = state.step
        self._closed_at = {state.step: sequence}
        self._histories = [PromptHistory(index, ledger) for index, ledger in enumerate(state.ledgers)]

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
        """Record the step that has just been done."""
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
        """The problems of a group that was trained on."""
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
        if age > settings.sync_max_staleness:
            yield f"lags by {age} steps, allowed are {settings.sync_max_staleness}"

    def _roll_back(self, state: State) -> None:
        """The run went on from an earlier step: what came after it did not happen."""
        kept = max(0, state.step - self._first_step)
        self._undone += len(self._batches) - kept
        del self._batches[kept:]
        closed_at = self._closed_at.get(state.step)
        if closed_at is None:
            self._problem(f"the run went on from step {state.step}, which it had never done")
            closed_at = 0
        self._used = {lease: step for lease, step in self._used.items() if step <= state.step}
        for history, ledger in zip(self._histories, state.ledgers, strict=True):
            history.roll_back(ledger, closed_at)

    def _totals(self, state: State) -> Iterator[str]:
        for history, ledger in zip(self._histories, state.ledgers, strict=True):
            yield from history.differences(ledger)
        if [batch.step for batch in self._batches] != list(range(self._first_step + 1, state.step + 1)):
            yield f"the run has done {state.step - self._first_step} steps, on record are {len(self._batches)} batches"

    def _check(self, state: State) -> None:
        try:
            check(state)
        except AssertionError as error:
            self._problem(str(error))

    def _problem(self, problem: str) -> None:
        if problem not in self._problems and len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(problem)


def _gist(sample: Sample) -> Sample:
    """A sample without its words for people, which orders leave out."""
    return attrs.evolve(sample, detail="")
