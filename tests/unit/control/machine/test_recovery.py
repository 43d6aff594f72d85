from __future__ import annotations

import pytest

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.control.machine import core, membership, recovery
from cosmos_core.control.machine.changes import values_at
from cosmos_core.control.machine.events import Commanded, JoinTimedOut, RegroupDue, RolledBack
from cosmos_core.errors import JournalError
from cosmos_core.transport.messages import REQUEST, Set
from cosmos_core.transport.reports import (
    CheckpointFailed,
    CheckpointSaved,
    GenerationFormed,
    GroupFinished,
    StepDone,
    WeightsLoaded,
)
from cosmos_service_tools.auditor import audit


def roll_back(it):
    """What the server loop does."""
    assert recovery.is_headless(it.state)
    it.apply(RolledBack(step=recovery.newest_kept(it.state)))


def save(it, name="p0"):
    """Only save what there is to be saved."""
    step = it.directive(name).checkpoint
    it.world.checkpoints[step] = it.fakes[name].digest
    it.report(name, CheckpointSaved(step=step, path=f"checkpoints/step-{step}"))


def advance(it, step):
    """Train up to a step, leaving what is generated on the way where it is."""
    while it.state.step < step:
        it.follow()


def test_weights_that_are_in_a_checkpoint_are_loaded_and_nothing_is_undone(run):
    it = run(steps=6, policy_checkpoint_interval=2)
    it.start()
    advance(it, 2)
    save(it)
    leases, digest = it.leases(), it.world.checkpoints[2]
    it.lose("p0")
    assert not recovery.is_headless(it.state)
    assert membership.missing(it.state) == {"policy": (1, 1)}
    it.join("p9")
    order = it.directive("p9").generation
    assert (order.step, order.checkpoint, order.transfer) == (2, "checkpoints/step-2", False)
    assert it.leases() == leases
    it.follow("p9")
    assert (it.fakes["p9"].step, it.fakes["p9"].digest) == (2, digest)
    it.settle()
    assert (it.state.outcome, it.state.rollbacks) == ("finished", [])
    assert [record.step for record in it.state.steps] == list(range(1, 7))

    it = run(steps=6, policy_checkpoint_interval=2, prompts=2)
    it.start()
    advance(it, 2)
    save(it)
    while it.state.running is None:
        it.follow("r0")
    groups = it.state.running.order.groups
    it.lose("p0")
    it.join("p9")
    it.follow("p9")
    assert it.directive("p9").train.groups == groups
    assert it.directive("p9").train.attempt == 2


def test_without_the_newest_weights_the_run_goes_back_to_its_checkpoint(run):
    it = run(steps=8, policy_checkpoint_interval=3, rollout_replicas=2, sync_max_staleness=2)
    it.start(rollouts=2)
    advance(it, 5)
    saved = dict(it.state.checkpoints.saved)
    assert list(saved) == [3]
    before = it.state.ledger.samples
    generated, consumed = before.generated, it.state.marks[3].ledgers[0].samples.consumed
    it.lose("p0")
    roll_back(it)
    state = it.state
    assert (state.step, len(state.steps), state.rollbacks) == (3, 3, [3])
    assert state.checkpoints.saved == saved
    samples = state.ledger.samples
    assert (samples.generated, samples.consumed) == (generated, consumed)
    assert samples.dropped["rolled-back"] > 0
    assert state.ledger.consumed == 3 * 2
    assert set(state.marks) == {0, 3}
    # The audit gives up the steps that the run did.
    found = audit((sequence, 0.0, event) for sequence, event in enumerate(it.events))
    assert (found.undone, [batch.step for batch in found.batches], found.problems) == (2, [1, 2, 3], ())
    assert not any(replica.held for replica in state.replicas.values())
    it.join("p9")
    it.settle()
    assert (state.outcome, state.step) == ("finished", 8)
    assert [record.step for record in state.steps] == list(range(1, 9))
    assert core.fold(it.events) == state


def test_versions_after_the_checkpoint_are_given_up_and_come_again_with_other_weights(run):
    it = run(steps=8, policy_checkpoint_interval=3, sync_max_staleness=2)
    it.start()
    advance(it, 5)
    while it.fakes["r0"].version < 4:
        it.follow("r0")
    abandoned = it.fakes["r0"].version
    old = it.state.published[abandoned].digest
    held = it.leases()
    it.lose("p0")
    roll_back(it)
    assert it.state.replicas["r0"].version == -1
    assert it.directive("r0").rollbacks == (3,)
    assert all(version <= 3 for version in it.state.published)
    # What it says before it has heard of that counts for nothing.
    it.report("r0", WeightsLoaded(version=abandoned, digest=old, transfer_s=0, paused_s=0, nbytes=1))
    assert it.state.replicas["r0"].version == -1
    generated = it.state.ledger.samples.generated
    it.report("r0", *(GroupFinished(lease=lease.lease, samples=()) for lease in held))
    assert it.state.ledger.samples.generated == generated
    assert not it.state.ledger.finished
    it.join("p9")
    while it.state.step < abandoned:
        it.follow()
    assert it.state.published[abandoned].digest != old
    it.settle()
    assert it.state.outcome == "finished"


def test_who_has_weights_of_the_checkpoint_or_before_goes_on_generating(run):
    it = run(steps=8, policy_checkpoint_interval=3, sync_max_staleness=8, rollout_replicas=2)
    it.start(rollouts=2)
    while it.state.step < 4:
        it.follow("p0", "r0")
        if it.fakes["r1"].version < 3:
            it.report("r1", *it.fakes["r1"]._load(it.directive("r1")))
    assert it.state.replicas["r1"].version == 3
    it.lose("p0")
    roll_back(it)
    assert it.state.replicas["r1"].version == 3
    assert it.leases("r1")
    it.join("p9")
    it.settle()
    assert it.state.outcome == "finished"


def test_without_a_checkpoint_it_begins_again_with_whoever_joins(run):
    it = run(steps=4)
    it.start()
    advance(it, 2)
    it.lose("p0")
    roll_back(it)
    assert (it.state.step, it.state.rollbacks, it.state.steps) == (0, [0], [])
    it.join("p0")
    assert it.directive("p0").generation.checkpoint == ""
    it.settle()
    assert (it.state.outcome, it.state.step) == ("finished", 4)

    it = run(steps=8, policy_checkpoint_interval=2, prompts=2)
    it.start()
    advance(it, 3)
    it.settle("r0")
    it.join("p1")
    it.lose("p0")
    assert it.directive("p1").generation is None
    roll_back(it)
    assert it.directive("p1").generation.checkpoint == "checkpoints/step-2"
    it.settle()
    assert it.state.outcome == "finished"


def test_weights_of_a_broken_transfer_or_of_a_later_step_are_not_trained(run):
    it = run(policy_replicas=2)
    it.join("p0")
    it.join("p1")
    for name in ("p0", "p1"):
        it.report(name, GenerationFormed(generation=1, step=-1))
    it.apply(RegroupDue())
    assert not it.state.named("policy")
    assert "transfer broke off" in it.state.fenced[it.incarnations["p1"]]
    it.join("p0")
    assert it.directive("p0").generation.members == ("p0",)

    it = run(steps=8, policy_checkpoint_interval=2, prompts=2)
    it.start()
    advance(it, 5)
    it.join("p1", step=2)
    it.state.replicas["p1"].step = 5
    it.lose("p0")
    it.apply(RolledBack(step=2))
    assert "taken back to step 2" in it.state.fenced[it.incarnations["p1"]]


def test_a_run_fails_if_nobody_comes_or_all_are_lost_again_and_again(run):
    it = run()
    it.start()
    it.lose("p0")
    it.apply(JoinTimedOut(timeout_s=5.0))
    assert it.state.outcome == "failed"
    assert "missing after 5 s (control.join_timeout_s): 1 of 1 policy replicas" in it.state.reason

    it = run(steps=4)
    it.start()
    for number in range(recovery.MAX_ROLLBACKS + 1):
        advance(it, 1)
        it.lose(f"p{number}")
        roll_back(it)
        it.join(f"p{number + 1}")
    assert it.state.outcome == "failed"
    assert "lost 11 times before a checkpoint after step 0" in it.state.reason


def test_a_run_that_is_stopping_stops_where_its_checkpoint_is(run):
    it = run(steps=8, policy_checkpoint_interval=2)
    it.start()
    advance(it, 3)
    it.stop()
    it.lose("p0")
    roll_back(it)
    assert (it.state.outcome, it.state.step) == ("stopped", 2)


def test_a_step_that_nobody_knows_is_refused(run):
    it = run()
    it.start()
    with pytest.raises(JournalError, match="taken back to step 2, of which the journal has no snapshot"):
        it.apply(RolledBack(step=2))


def put(it, override):
    request = Set(overrides=(override,))
    it.apply(Commanded(ident=f"set {override}", request=REQUEST.encode(request)))


def test_changes_after_the_checkpoint_are_undone_and_told(run):
    key = "policy.optimizer.lr"
    it = run(steps=8, policy_checkpoint_interval=3, prompts=2, dynamic=(DynamicKey(key=key, type="number", value=0.1),))
    it.start()
    advance(it, 1)
    put(it, f"{key}=0.2")
    advance(it, 5)
    put(it, f"{key}=0.3")
    (first, second) = it.state.changes
    assert first.step <= 4 < second.step
    it.lose("p0")
    roll_back(it)
    assert it.state.changes == [first]
    told = it.state.status_details["settings"]
    assert told == f"going on from step 3 undid {key} = 0.3 from step {second.step} on"
    it.join("p9")
    it.settle()
    assert it.state.outcome == "finished"
    assert values_at(it.state, 8) == {key: 0.2}


def test_what_was_said_of_a_generation_that_was_undone_does_not_count(run):
    it = run(steps=8, prompts=2)
    it.start()
    advance(it, 3)
    undone = it.state.generation_number
    it.join("p1")
    it.lose("p0")
    roll_back(it)
    it.report("p1", GenerationFormed(generation=undone, step=3))
    done = {"step": 3, "attempt": 1, "skipped": False, "metrics": {}}
    it.report("p1", StepDone(generation=undone, **done))
    assert it.state.replicas["p1"].step == 0
    it.settle()
    assert it.state.outcome == "finished"


def test_a_checkpoint_that_an_undone_generation_made_of_a_step_is_not_the_one_that_the_step_has_now(run):
    it = run(steps=8, prompts=2, policy_checkpoint_interval=2)
    it.start()
    advance(it, 2)
    save(it)
    advance(it, 4)
    undone = it.state.generation_number
    it.lose("p0")
    roll_back(it)
    it.join("p1")
    it.report("p1", CheckpointSaved(step=4, path="of a step that the run is not at", generation=undone))
    assert sorted(it.state.checkpoints.saved) == [2]
    advance(it, 4)
    assert it.state.checkpoints.ordered == 4
    it.report("p1", CheckpointSaved(step=4, path="of the first time", generation=undone))
    it.report("p1", CheckpointFailed(step=4, reason="of the first time", generation=undone))
    assert (it.state.checkpoints.ordered, sorted(it.state.checkpoints.saved)) == (4, [2])
    it.report("p1", CheckpointSaved(step=4, path="of now", generation=it.state.generation_number))
    assert (it.state.checkpoints.ordered, it.state.checkpoints.saved[4]) == (-1, "of now")


def test_who_said_that_it_has_everything_after_its_generation_broke_keeps_the_run(run):
    it = run(steps=8, prompts=2)
    it.start()
    advance(it, 3)
    it.join("p1")
    while it.directive("p1").generation is None:
        it.follow("p0", "r0")
    step = it.fakes["p0"].step
    it.follow("p0")
    reports = it.fakes["p1"].follow(it.directive("p1"))
    it.lose("p0")
    assert recovery.is_headless(it.state)
    it.report("p1", *reports)
    assert not recovery.is_headless(it.state)
    it.settle()
    assert (it.state.outcome, it.state.rollbacks) == ("finished", [])
    assert it.fakes["p1"].trained[0].step == step + 1
