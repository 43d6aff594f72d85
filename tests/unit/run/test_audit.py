"""The audit of a run's journal: what is sound passes, and what is planted in it is found."""

import re
from types import SimpleNamespace

import attrs
import pytest

from cosmos_core.control.machine import batch_assembly, progress
from cosmos_core.control.machine.directives import directive_for
from cosmos_core.control.machine.events import Commanded, ControllerStarted, Reported
from cosmos_core.control.machine.ledger import Ledger
from cosmos_core.control.machine.records import OTHER_REASONS
from cosmos_core.errors import JournalError
from cosmos_core.transport.directives import GroupRef
from cosmos_core.transport.messages import REQUEST, Set
from cosmos_core.transport.reports import REPORT, GroupFinished, StepDone
from cosmos_service_tools.auditor import PromptHistory, audit


def test_a_sound_run_has_no_problems_and_every_batch(finished):
    found = audit(finished.entries)
    assert found.problems == ()
    assert [batch.step for batch in found.batches] == list(range(1, 10))
    for index, stage in enumerate(found.stages):
        ledger = finished.state.ledgers[index]
        assert stage.consumed == ledger.consumed > 0
        assert stage.dropped == ledger.dropped
        assert stage.given_out == stage.consumed + sum(stage.dropped.values()) + stage.live
    assert sum(found.stages[1].dropped.values()) > 0
    assert all(batch.members == ("policy-0",) for batch in found.batches)

    # What is no journal is refused.
    with pytest.raises(JournalError, match="begins with ControllerStarted"):
        audit([(1, 0.0, ControllerStarted(term=1))])
    with pytest.raises(JournalError, match="is empty"):
        audit([])


def test_drops_whose_reasons_are_counted_together_are_on_record_like_that():
    ledger = Ledger(next_position=50, dropped={f"reason {number}": 1 for number in range(50)})
    history = PromptHistory(0, ledger)
    for row, reason in enumerate(("reason 7", "reason 50", "reason 51")):
        position = ledger.next()
        ledger.finished[position] = GroupRef(position=position, row=row)
        ledger.batch([position])
        ledger.drop(position, reason)
        read = SimpleNamespace(step=1, groups=(), dropped={position: reason})
        assert [*history.move(ledger, read, sequence=row)] == []
    assert [*history.differences(ledger)] == []
    assert history.found().dropped == ledger.dropped
    assert (ledger.dropped["reason 7"], ledger.dropped[OTHER_REASONS]) == (2, 2)


def test_steps_that_were_given_up_are_told_apart(history):
    # A replica that is lost and a run that goes on are sound.
    history.join()
    history.work(until=5)
    history.lose("rollout-0", "silent")
    found = audit(history.entries)
    assert found.problems == ()
    assert found.lost == 1
    assert found.stages[1].live > 0
    history.join()
    history.work(until=7)
    undone = history.state.step - 4
    history.resume(4)
    history.join(step=4)
    history.work()
    found = audit(history.entries)
    assert found.problems == ()
    assert found.undone == undone > 0
    assert [batch.step for batch in found.batches] == list(range(1, 10))


def test_a_bound_that_is_lowered_while_a_step_is_trained_does_not_accuse_it(history):
    history.join()
    while not (history.state.running and any(stale(history.state))):
        assert not history.state.outcome, "no step had a sample that lagged"
        follow_once(history, "policy-0")
        follow_once(history, "rollout-0")
    asked = Set(overrides=("sync.max_staleness=0",))
    history.append(Commanded(ident="lower", request=REQUEST.encode(asked)))
    history.work()
    assert history.state.settings.sync_max_staleness == 0
    assert audit(history.entries).problems == ()


def stale(state):
    """Whether each group of the running step lags."""
    return [
        min(sample.oldest_version for sample in group.samples) < state.step
        for group in state.running.order.groups
        if group.samples
    ]


def follow_once(history, name):
    """Let a replica do what it can; samples are of weights one step older than they could be."""
    for said in history.fakes[name].follow(directive_for(history.state, name)):
        replica, report = history.state.replicas[name], said
        if isinstance(said, GroupFinished):
            old = [attrs.evolve(each, oldest_version=max(0, each.oldest_version - 1)) for each in said.samples]
            report = attrs.evolve(said, samples=tuple(old))
        history.append(
            Reported(
                name=name,
                incarnation=replica.incarnation,
                sequence=replica.received + 1,
                report=REPORT.encode(report),
            )
        )


def consume_twice(ledger, position):
    group = Ledger.consume_once(ledger, position)
    ledger.finished[position] = group
    return group


def consume_without_counting(ledger, position):
    ledger.consumed -= 1
    return Ledger.consume_once(ledger, position)


def drop_without_counting(ledger, position, reason):
    group = Ledger.drop_once(ledger, position, reason)
    ledger.dropped[reason] -= 1
    return group


def test_accounting_that_is_broken_is_found(job, open_history, monkeypatch):
    for move, fault, problem in (
        ("consume", consume_twice, "accounted for|claims|came back|consumed|two places|given out"),
        ("consume", consume_without_counting, "prompts given out"),
        ("drop", drop_without_counting, "prompts given out"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, f"{move}_once", getattr(Ledger, move), raising=False)
            patch.setattr(Ledger, move, fault)
            history = open_history(job)
            history.join()
            history.work(until=8)
            found = audit(history.entries)
        assert any(re.search(problem, each) for each in found.problems), fault


def changed(entries, kind, change):
    """The entries with the first report of a kind changed."""
    is_done = False
    for sequence, when, event in entries:
        if isinstance(event, Reported) and not is_done:
            report = REPORT.decode(event.report)
            if isinstance(report, kind) and (new := change(report)) is not None:
                is_done = True
                yield sequence, when, attrs.evolve(event, report=REPORT.encode(new))
                continue
        yield sequence, when, event


def test_a_fault_of_a_step_is_found(finished, monkeypatch):
    # A step that a member never applied is found.
    # The state machine takes any word for a step's end.
    monkeypatch.setattr(
        progress,
        "on_step_done",
        lambda state, replica, report: state.running is not None,
    )
    entries = changed(finished.entries, StepDone, lambda report: attrs.evolve(report, step=report.step + 5))
    assert any("has not said that it applied it" in problem for problem in audit(entries).problems)
    # Stale samples that were trained on are found.
    monkeypatch.setattr(batch_assembly, "is_stale", lambda state, group: False)

    def aged(report):
        if not report.samples or min(sample.oldest_version for sample in report.samples) < 6:
            return None
        return attrs.evolve(
            report, samples=tuple(attrs.evolve(sample, oldest_version=0) for sample in report.samples), drop=""
        )

    problems = audit(changed(finished.entries, GroupFinished, aged)).problems
    assert any("lags by" in problem for problem in problems)
