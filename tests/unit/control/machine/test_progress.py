from __future__ import annotations

import attrs
import pytest

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Resumed
from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.records import EvaluationRecord
from cosmos_core.errors import JournalError
from cosmos_core.transport.reports import CheckpointFailed


def until(it, step):
    """Let everyone work until a step is done."""
    for _ in range(1000):
        if it.state.step >= step:
            return
        it.follow()
    raise AssertionError(f"step {step} is not reached")


def together(it, *names):
    for name in names:
        it.join(name)
    return it


def test_checkpoints_are_ordered_by_interval_and_at_the_end(run):
    it = together(run(steps=5, policy_checkpoint_interval=2), "p0", "r0")
    it.settle()
    assert sorted(it.state.checkpoints.saved) == [2, 4, 5]
    assert it.state.checkpoints.ordered == -1

    # Old ones are removed, but for the best, and a run that goes on from one does not have them again.
    it = together(run(steps=5, policy_checkpoint_interval=1, policy_checkpoint_keep=2), "p0", "r0")
    until(it, 3)
    best = {"num_prompts": 2, "num_unscored": 0, "num_truncated": 0, "completions": ()}
    it.state.evaluations = [EvaluationRecord(version=2, accuracy=1.0, reward=1.0, **best)]
    it.settle()
    assert sorted(it.state.checkpoints.kept) == [2, 4, 5]
    it.resume(4)
    assert sorted(it.state.checkpoints.kept) == [2, 4]
    it.join("p0", step=4)
    together(it, "r0").settle()
    assert sorted(it.state.checkpoints.kept) == [2, 4, 5]

    it = together(run(warmup=4, policy_checkpoint_interval=2), "p0")
    it.follow("p0")
    it.follow("p0")
    it.follow("p0")
    directive = it.directive("p0")
    assert (it.state.step, directive.checkpoint, directive.train.step) == (2, 2, 3)

    it = together(run(warmup=50, policy_checkpoint_interval=20), "p0")
    until(it, 45)
    assert sorted(it.state.marks) == [0, 20, 40, 45]


def test_a_failed_checkpoint_is_told_and_only_the_last_fails_the_run(run):
    it = together(run(steps=4, policy_checkpoint_interval=2), "p0", "r0")
    until(it, 2)
    it.report("p0", CheckpointFailed(step=2, reason="disk full"))
    assert it.state.checkpoints.failed == {2: "disk full"}
    assert it.directive("p0").checkpoint == -1
    it.settle()
    assert it.state.outcome == "finished"

    it = together(run(steps=1), "p0", "r0")
    until(it, 1)
    it.report("p0", CheckpointFailed(step=1, reason="disk full"))
    assert it.state.outcome == "failed"
    assert "disk full" in it.state.reason


def test_the_best_checkpoint_is_the_saved_one_with_the_best_evaluation(run):
    it = run()
    assert best_checkpoint(it.state) is None
    it = together(run(steps=4, policy_checkpoint_interval=1, evaluation_prompts=2, evaluation_interval=1), "p0", "r0")
    it.settle()
    scores = {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.7}
    it.state.evaluations = [attrs.evolve(done, accuracy=scores.get(done.version, 1.0)) for done in it.state.evaluations]
    assert best_checkpoint(it.state) == 3
    losses = {1: 0.7, 2: float("nan"), 3: 0.9, 4: 0.8}
    it.state.evaluations = [
        attrs.evolve(done, accuracy=None, loss=losses.get(done.version, 0.1)) for done in it.state.evaluations
    ]
    assert best_checkpoint(it.state) == 1
    # Where preferences are learnt, the loss of the preferred completions says nothing of it.
    stages = (attrs.evolve(it.state.settings.main, source="preferences"),)
    it.state.settings = attrs.evolve(it.state.settings, stages=stages)
    assert best_checkpoint(it.state) is None


def test_a_stop_saves_at_the_next_step_boundary_and_ends(run):
    it = run(steps=9)
    it.start()
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    it.stop()
    assert it.directive("p0").train.step == 1
    assert it.directive("p0").checkpoint == -1
    it.train()
    directive = it.directive("p0")
    assert (it.state.step, directive.checkpoint, directive.train) == (1, 1, None)
    assert not directive.stop
    it.train()
    assert it.state.outcome == "stopped"
    assert it.directive("p0").stop
    assert it.directive("r0").stop

    it = run(steps=9)
    it.start()
    number = len(it.leases())
    it.stop()
    it.finish("r0", it.leases()[0])
    assert len(it.leases()) == number - 1
    it.train()
    assert (it.state.outcome, sorted(it.state.checkpoints.saved)) == ("stopped", [0])


def test_a_stop_with_nothing_to_save_ends_at_once(run):
    it = run(policy_replicas=2)
    it.join("p0")
    it.stop()
    assert it.state.outcome == "stopped"

    it = run(steps=9, policy_checkpoint_interval=1)
    it.start()
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    it.train()
    it.train()
    assert sorted(it.state.checkpoints.saved) == [1]
    it.stop()
    assert it.state.outcome == "stopped"

    it = run()
    it.start()
    it.state.conclude("stopped")
    it.state.fail("too late")
    assert (it.state.outcome, it.state.reason) == ("stopped", "")


def test_a_resumed_run_is_the_fold_up_to_its_step(run):
    it = together(run(warmup=2, steps=6, policy_checkpoint_interval=2, evaluation_prompts=2), "p0", "r0")
    until(it, 4)
    length = len(it.events)
    it.settle()
    assert it.state.outcome == "finished"
    then = core.fold(it.events[:length])
    assert then.step == 4
    it.resume(4)
    state = it.state
    assert (state.step, state.outcome, state.has_started, state.replicas) == (4, "", False, {})
    assert state.steps == then.steps
    assert [ledger.consumed for ledger in state.ledgers] == [ledger.consumed for ledger in then.ledgers]
    assert [ledger.dropped for ledger in state.ledgers] == [ledger.dropped for ledger in then.ledgers]
    ledger, before = state.ledger, then.ledger
    # The moment is before anything that the end of the step made possible.
    live = sorted((*before.queued, *before.in_flight, *before.finished, *before.batched))
    assert ledger.queued == [position for position in live if position < ledger.next_position] != []
    assert ledger.next_position <= before.next_position
    assert sorted(state.checkpoints.saved) == [2, 4]
    assert state.generation_number == 1
    assert state.next_lease > max(then.next_lease, 1)
    assert state.publish == 4
    assert [done.version for done in state.evaluations] == [2]
    it.join("p0", step=4)
    it.join("r0")
    it.settle()
    assert (state.outcome, state.step) == ("finished", 8)
    assert [record.step for record in state.steps] == list(range(1, 9))
    assert state.generation_number == 2


def test_a_run_can_be_resumed_again_longer_and_from_no_unknown_step(run, settings):
    it = together(run(steps=4, policy_checkpoint_interval=1), "p0", "r0")
    it.settle()
    for step in (3, 2, 0):
        it.resume(step)
        assert sorted(it.state.marks) == list(range(step + 1))
        it.join("p0", step=step)
        it.join("r0")
        it.settle()
        assert it.state.outcome == "finished"
        assert core.fold(it.events) == it.state

    it = together(run(steps=4, policy_checkpoint_interval=2), "p0", "r0")
    it.settle()
    with pytest.raises(JournalError, match=r"step 3.*\[0, 2, 4\]"):
        core.step(it.state, Resumed(step=3, settings=it.state.settings))
    assert it.state.outcome == "finished"

    it = together(run(steps=2), "p0", "r0")
    it.settle()
    for fake in it.fakes.values():
        fake.end()
    it.fakes.clear()
    it.apply(Resumed(step=2, settings=settings(steps=4)))
    it.join("p0", step=2)
    it.join("r0")
    it.settle()
    assert (it.state.outcome, it.state.step) == ("finished", 4)


def test_an_unfinished_evaluation_of_the_resumed_step_is_done_again(run):
    it = together(run(steps=2, evaluation_prompts=2, evaluation_interval=1, policy_checkpoint_interval=1), "p0", "r0")
    until(it, 1)
    assert [due.version for due in it.state.pending] == [1]
    it.settle("p0")
    it.resume(1)
    assert [due.version for due in it.state.pending] == [1]
    it.join("p0", step=1)
    it.join("r0")
    it.settle()
    assert [done.version for done in it.state.evaluations] == [0, 1, 2]


def test_sync_runs_train_the_same_whenever_they_are_interrupted(run):
    options = {"synchronous": True, "sync_max_staleness": 0, "steps": 6, "rollout_replicas": 2, "policy_replicas": 2}
    names = ("p0", "p1", "r0", "r1")
    whole = together(run(**options, evaluation_prompts=3), *names)
    for name in ("r0", "r1"):
        whole.fakes[name]._drop_every = 3
    whole.settle()
    for cut in range(1, 6):
        it = together(run(**options, evaluation_prompts=3), *names)
        for name in ("r0", "r1"):
            it.fakes[name]._drop_every = 3
        until(it, cut)
        it.stop()
        it.settle()
        assert it.state.outcome == "stopped"
        step = it.state.step
        it.resume(step)
        for name in names:
            it.join(name, step=step if name.startswith("p") else 0)
        for name in ("r0", "r1"):
            it.fakes[name]._drop_every = 3
        it.settle()
        assert it.world.checkpoints[6] == whole.world.checkpoints[6]
        assert it.state.ledger.dropped == whole.state.ledger.dropped != {}
