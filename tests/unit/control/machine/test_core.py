from __future__ import annotations

import copy

import attrs
import pytest

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import ControllerStarted, JoinTimedOut, ReplicaLost, Reported, RunOpened
from cosmos_core.control.machine.records import StageTotals
from cosmos_core.errors import JournalError, TransportError
from cosmos_core.transport.reports import REPORT, CheckpointSaved, Failed, GroupFinished, StepDone, Troubled


def test_a_run_goes_from_its_first_weights_to_its_last_checkpoint(run):
    it = run(warmup=2, steps=3, evaluation_prompts=5, evaluation_interval=2, policy_checkpoint_interval=2)
    it.join("p0")
    it.join("r0")
    it.settle()
    state = it.state
    assert (state.outcome, state.step) == ("finished", 5)
    assert [record.step for record in state.steps] == [1, 2, 3, 4, 5]
    assert [record.stage for record in state.steps] == [0, 0, 1, 1, 1]
    assert [done.version for done in state.evaluations] == [2, 4, 5]
    assert sorted(state.checkpoints.saved) == [2, 4, 5]
    assert state.ledgers[0].consumed == 6
    assert state.ledgers[1].consumed == 6
    assert it.directive("p0").stop
    assert it.directive("r0").stop

    it = run(warmup=1, evaluation_prompts=3)
    it.join("p0")
    it.join("r0")
    it.settle()
    assert core.fold(it.events) == it.state


def test_a_step_record_tells_what_was_trained_on(run, make_sample):
    it = run(steps=1, prompts=2)
    it.start()
    first, second = it.leases()[:2]
    it.finish(
        "r0",
        first,
        make_sample(0, reward=1.0, units=3),
        make_sample(1, reward=0.0, units=4, status="truncated"),
        make_sample(2, status="reward_failed"),
        make_sample(3, status="reward_timeout"),
    )
    it.finish("r0", second, *(make_sample(index, reward=1.0, units=1) for index in range(4)))
    it.train()
    (record,) = it.state.steps
    assert record.reward == pytest.approx(5 / 6)
    assert record.rewards == {"right": pytest.approx(5 / 6)}
    assert record.truncated == pytest.approx(1 / 6)
    assert record.failed == {"reward_failed": 1, "reward_timeout": 1}
    assert (record.num_groups, record.num_samples, record.num_units) == (2, 6, 11)
    # One group's scored samples differ, and the other's are all equal.
    assert record.equal == {1.0: 1}
    assert it.state.ledger.totals.trained == record.num_trained == 6
    totals = StageTotals()
    totals.add(attrs.evolve(record, metrics={"trained_sequences": 2.0}))
    totals.add(attrs.evolve(record, skipped=True))
    assert (totals.samples, totals.trained) == (12, 2)
    assert record.metrics == {"loss": 1.0, "wait_s": 0.5}
    samples = it.state.ledger.samples
    assert (samples.generated, samples.consumed) == (8, 6)
    assert samples.dropped == {"reward_failed": 1, "reward_timeout": 1}


def test_what_goes_wrong_on_replicas_is_counted_over_all_of_them_and_a_resume(run):
    it = run(steps=3, prompts=2)
    it.start()
    it.join("r1")
    for name, number in [("r0", 1), ("r1", 40), ("r0", 2000)]:
        it.report(name, Troubled(what="samples that could not be written", number=number, last=f"{name} is full"))
    assert it.state.status_details == {"samples that could not be written": "2,041, the last: r0 is full"}
    for lease, awaited_s in zip(it.leases()[:2], (2.0, 3.0), strict=True):
        it.finish("r0", lease, awaited_s=awaited_s)
    it.train()
    assert [record.awaited_s for record in it.state.steps] == [2.5]
    assert it.state.awaited_s == 0.0
    it.resume(0)
    it.join("r0")
    it.join("p0")
    it.report("r0", Troubled(what="samples that could not be written", number=1, last="r0 is full"))
    assert it.state.status_details == {"samples that could not be written": "2,042, the last: r0 is full"}
    it.report("p0", Troubled(what="w", number=1, last="x"))
    assert it.state.status_details["w"] == "1, the last: x"


def test_a_report_that_is_fenced_repeated_unreadable_or_of_another_attempt_changes_nothing(run):
    it = run()
    it.start()
    lease = it.leases()[0]
    data = REPORT.encode(GroupFinished(lease=lease.lease, samples=()))
    old = it.incarnations["r0"]
    it.lose("r0")
    it.join("r0")
    before = copy.deepcopy(it.state)
    received = it.state.replicas["r0"].received
    for incarnation, sequence in ((old, 1), (old, 2), (it.incarnations["r0"], received + 2), ("?", 1)):
        core.step(it.state, Reported(name="r0", incarnation=incarnation, sequence=sequence, report=data))
        core.step(it.state, ReplicaLost(name="r0", incarnation=old, reason="silent"))
    assert it.state == before

    it = run()
    it.start()
    it.finish("r0", it.leases()[0])
    before = copy.deepcopy(it.state)
    core.step(it.state, it.events[-1])
    assert it.state == before

    it = run()
    it.start()
    before = copy.deepcopy(it.state)
    sequence = it.state.replicas["r0"].received + 1
    with pytest.raises(TransportError):
        core.step(it.state, Reported(name="r0", incarnation=it.incarnations["r0"], sequence=sequence, report=b"?"))
    assert it.state == before

    it = run()
    it.start()
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    order = it.directive("p0").train
    generation = it.state.generation_number
    done = {"step": order.step, "attempt": order.attempt, "generation": generation, "skipped": False, "metrics": {}}
    it.report("p0", StepDone(**done | {"attempt": order.attempt + 1}))
    it.report("p0", StepDone(**done | {"generation": generation + 1}))
    assert it.state.step == 0
    it.report("p0", StepDone(**done))
    assert it.state.step == 1


def test_a_failed_replica_a_wrong_report_and_absence_fail_the_run(run):
    it = run()
    it.start()
    it.report("r0", Failed(reason="out of memory"))
    assert (it.state.outcome, it.state.reason) == ("failed", "r0: out of memory")
    assert it.directive("p0").stop

    it = run()
    it.start()
    it.report("r0", CheckpointSaved(step=1, path="x"))
    assert it.state.outcome == "failed"

    it = run(policy_replicas=2)
    it.join("p0")
    it.apply(JoinTimedOut(timeout_s=3))
    assert it.state.outcome == "failed"
    assert "1 of 2 policy replicas and 1 of 1 rollout replicas" in it.state.reason


def test_a_history_begins_with_its_opening_and_a_new_term_keeps_it(settings, run):
    with pytest.raises(JournalError, match="ControllerStarted, not RunOpened"):
        core.fold([ControllerStarted(term=1)])
    with pytest.raises(JournalError, match="empty"):
        core.fold([])
    assert core.fold([RunOpened(settings=settings())]).step == 0

    it = run()
    it.start()
    before = copy.deepcopy(it.state)
    it.apply(ControllerStarted(term=7))
    assert it.state.term == 7
    it.state.term = before.term
    assert it.state == before
