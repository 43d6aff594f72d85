from __future__ import annotations

import math

import attrs
import pytest

from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.records import merits, score_name
from cosmos_core.control.machine.settings import StageSettings
from cosmos_core.transport.reports import GroupFailed, HeldOutLoss, StepDone


def test_held_out_rows_come_before_training_and_are_pinned(run):
    it = run(evaluation_prompts=3, capacity=2)
    it.start()
    held_out = [lease for lease in it.leases() if lease.purpose == "evaluation"]
    assert [(lease.position, lease.row, lease.version) for lease in held_out] == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    assert it.leases()[0].purpose == "evaluation"
    # Three sequences leave room for one group of four among eight.
    assert [lease.position for lease in it.leases() if lease.purpose == "train"] == [0]

    it = run(evaluation_prompts=2)
    it.start()
    it.join("r1")
    assert it.leases("r1") == []


def test_rollout_replicas_stay_at_the_version_that_is_evaluated_and_training_goes_on(run):
    it = run(evaluation_prompts=2, prompts=1, sync_max_staleness=1, steps=5)
    it.start()
    held_out = it.leases()[:2]
    it.finish("r0", next(lease for lease in it.leases() if lease.purpose == "train"))
    it.train()
    assert it.state.step == 1
    assert 1 in it.state.published
    assert it.directive("r0").weights.version == 0
    assert it.directive("p0").retain == 0
    for lease in held_out:
        it.finish("r0", lease)
    assert it.directive("r0").weights.version == 1

    it = run(evaluation_prompts=2, prompts=1, sync_max_staleness=1)
    it.start()
    training = [lease for lease in it.leases() if lease.purpose == "train"]
    for lease in training[:2]:
        it.finish("r0", lease)
        it.train()
    assert it.state.step == 2
    assert it.state.evaluations == []


def test_unscored_rows_count_as_not_right(run, make_sample):
    it = run(evaluation_prompts=4, rewards=("right", "short"))
    it.start()
    leases = it.leases()
    it.finish("r0", leases[0], make_sample(reward=1.0), text="four")
    it.finish("r0", leases[1], make_sample(reward=0.0, status="truncated"), text="five")
    it.finish("r0", leases[2], make_sample(status="reward_timeout"), text="six")
    it.report("r0", GroupFailed(lease=leases[3].lease, reason="too_long", detail=""))
    (done,) = it.state.evaluations
    assert done.version == 0
    assert done.accuracy == pytest.approx(1 / 4)
    assert done.reward == pytest.approx(1 / 2)
    assert done.spread == pytest.approx(0.5**0.5)
    assert (done.num_prompts, done.num_unscored, done.num_truncated) == (4, 2, 1)
    assert [(each.row, each.text) for each in done.completions] == [(0, "four"), (1, "five"), (2, "six")]
    assert it.state.ledger.samples.generated == 0

    # What is neither right nor wrong has a reward, and no accuracy.
    it = run(evaluation_prompts=2)
    it.start()
    for lease, reward in zip(it.leases()[:2], (1.0, 0.5), strict=True):
        it.finish("r0", lease, make_sample(reward=reward))
    (done,) = it.state.evaluations
    assert (done.accuracy, done.reward, done.score) == (None, 0.75, 0.75)
    assert score_name([done], "token") == "reward"

    it = run(evaluation_prompts=1)
    it.start()
    it.finish("r0", it.leases()[0], make_sample(version=0, newest=1))
    (done,) = it.state.evaluations
    assert (done.accuracy, done.num_unscored) == (None, 1)

    it = run(evaluation_prompts=3, rewards=("dark",), unit="denoising step")
    it.start()
    leases = it.leases()
    it.finish("r0", leases[0], make_sample(reward=-1.0))
    it.finish("r0", leases[1], make_sample(reward=-2.0))
    it.finish("r0", leases[2], make_sample(status="reward_failed"))
    (done,) = it.state.evaluations
    assert (done.accuracy, done.reward, done.score, done.num_unscored) == (None, -1.5, -1.5, 1)


def test_an_evaluation_without_a_score_measured_nothing_and_is_never_the_best(run, make_sample, subtests):
    for unit in ["token", "denoising step"]:
        with subtests.test(unit=unit):
            it = run(evaluation_prompts=1, rewards=("dark",), unit=unit)
            it.start()
            it.finish("r0", it.leases()[0], make_sample(status="reward_failed"))
            (done,) = it.state.evaluations
            assert (done.score, done.reward, done.num_unscored) == (None, None, 1)
            assert merits([done]) == {done.version: -math.inf}
            it.state.checkpoints.saved.update({0: "none", 1: "worse", 2: "better"})
            assert best_checkpoint(it.state) is None
            scored = attrs.evolve(done, num_unscored=0)
            for version, reward in ((2, -1.0), (1, -2.0)):
                it.state.evaluations.append(attrs.evolve(scored, version=version, reward=reward))
            assert best_checkpoint(it.state) == 2


def test_only_the_first_completions_are_kept(run):
    it = run(evaluation_prompts=12, capacity=9)
    it.start()
    for lease in reversed([lease for lease in it.leases() if lease.purpose == "evaluation"]):
        it.finish("r0", lease)
    assert [each.row for each in it.state.evaluations[0].completions] == list(range(8))


def test_rows_of_a_lost_replica_are_leased_again(run):
    it = run(evaluation_prompts=16, rollout_replicas=2, capacity=3)
    it.start(rollouts=2)
    rows = {name: [lease.row for lease in it.leases(name) if lease.purpose == "evaluation"] for name in ("r0", "r1")}
    assert rows == {"r0": list(range(12)), "r1": [12, 13, 14, 15]}
    it.lose("r0")
    taken = [lease.row for lease in it.leases("r1") if lease.purpose == "evaluation"]
    assert len(taken) == 12
    assert sorted([*taken, *it.state.pending[0].queued]) == list(range(16))


def test_the_run_ends_after_its_last_evaluation(run):
    it = run(evaluation_prompts=1, steps=1, prompts=1)
    it.start()
    for lease in it.leases():
        it.finish("r0", lease)
    it.follow("p0")
    it.follow("p0")
    assert (it.state.step, sorted(it.state.checkpoints.saved), it.state.outcome) == (1, [1], "")
    it.settle()
    assert [done.version for done in it.state.evaluations] == [0, 1]
    assert it.state.outcome == "finished"


def test_an_evaluation_that_a_stop_cuts_off_is_told_and_made_again_if_its_weights_are_there(run):
    it = run(evaluation_prompts=2, prompts=1, sync_max_staleness=1)
    it.start()
    first, _ = (lease for lease in it.leases() if lease.purpose == "evaluation")
    it.finish("r0", first)
    it.stop()
    it.follow("p0")
    assert it.state.outcome == "stopped"
    assert it.state.status_details["evaluation at the stop"] == (
        "the stop cut off that of version 0 (1 of 2 prompts done, and a run that goes on begins again)"
    )
    it.resume(0)
    assert it.state.status_details == {}
    assert [due.version for due in it.state.pending] == [0]

    it = run(evaluation_prompts=2, prompts=1, sync_max_staleness=1)
    it.start()
    it.finish("r0", next(lease for lease in it.leases() if lease.purpose == "train"))
    it.train()
    it.stop()
    it.follow("p0")
    assert (it.state.step, it.state.outcome) == (1, "stopped")
    assert it.state.status_details["evaluation at the stop"] == (
        "the stop cut off that of version 0 (0 of 2 prompts done, and its weights are gone)"
    )
    it.resume(1)
    assert it.state.status_details == {"evaluation": "version 0 was lost before its evaluation was done"}
    assert it.state.pending == []


def test_an_evaluation_of_weights_that_are_gone_is_given_up(run):
    it = run(evaluation_prompts=2, prompts=1, sync_max_staleness=1, policy_replicas=2)
    it.start(policies=2)
    it.finish("r0", next(lease for lease in it.leases() if lease.purpose == "train"))
    it.follow("p0", "p1")
    assert it.state.step == 1
    it.lose("p0")
    it.join("p0")
    it.settle("p0", "p1")
    it.lose("p1")
    assert [due.version for due in it.state.pending] == [0]
    it.lose("r0")
    assert it.state.pending == []
    assert "version 0 was lost" in it.state.status_details["evaluation"]
    it.join("r0")
    it.settle()
    assert it.state.outcome == "finished"


def test_demonstrations_do_not_run_away_from_their_evaluations(run):
    stage = StageSettings(source="demonstrations", first_version=0, steps=20, prompts_per_step=2, min_group_size=1)
    it = run(evaluation_prompts=2, evaluation_interval=2, stages=(stage,))
    it.join("p0")
    it.settle()
    assert (it.state.step, [due.version for due in it.state.pending]) == (4, [0, 2, 4])
    assert sorted(it.state.published) == [0, 2, 4]
    it.join("r0")
    it.settle()
    assert it.state.outcome == "finished"
    assert [done.version for done in it.state.evaluations] == list(range(0, 21, 2))


IMITATION = StageSettings(source="demonstrations", first_version=0, steps=5, prompts_per_step=2, min_group_size=1)


def imitating(run, **options):
    it = run(stages=(IMITATION,), rollout_replicas=0, rewards=(), heldout_rows=3, **options)
    it.join("p0")
    it.follow()
    return it


def done(order, *measured, loss=2.0, generation=1, dropped=()):
    heldout = tuple(
        HeldOutLoss(version=version, loss=loss, num_units=9, num_rows=3 - len(dropped), dropped=dropped)
        for version in measured
    )
    return StepDone(
        step=order.step, attempt=order.attempt, generation=generation, skipped=False, metrics={}, heldout=heldout
    )


def test_the_held_out_loss_is_part_of_the_steps_that_need_it(run):
    it = imitating(run, evaluation_interval=2)
    asked = []
    while (order := it.directive("p0").train) is not None:
        asked.append((order.step, order.measures))
        it.report("p0", done(order, *order.measures, loss=1.0 / order.step))
    assert asked == [(1, (0,)), (2, (2,)), (3, ()), (4, (4,)), (5, (5,))]
    assert [record.version for record in it.state.evaluations] == [0, 2, 4, 5]
    assert [record.loss for record in it.state.evaluations] == [1.0, 0.5, 0.25, 0.2]
    first = it.state.evaluations[0]
    assert (first.accuracy, first.num_prompts, first.num_unscored, first.num_units) == (None, 3, 0, 9)
    assert first.perplexity == pytest.approx(math.e)
    assert it.state.pending == []
    assert "evaluation" not in it.state.status_details

    it = run(evaluation_prompts=2, evaluation_interval=1, warmup=1)
    it.join("p0")
    it.join("r0")
    it.settle()
    assert it.state.outcome == "finished"
    assert [order.measures for order in it.fakes["p0"].trained] == [()] * 4


def test_completions_are_scored_and_demonstrations_measured_once_of_the_same_weights(run):
    it = run(stages=(IMITATION,), rollout_replicas=1, heldout_rows=3, evaluation_prompts=2, evaluation_interval=2)
    it.join("p0")
    it.join("r0")
    it.settle()
    assert it.state.outcome == "finished"
    scored = [record for record in it.state.evaluations if record.accuracy is not None]
    measured = [record for record in it.state.evaluations if record.loss is not None]
    assert [record.version for record in measured] == [0, 2, 4, 5]
    assert sorted(record.version for record in scored) == [0, 2, 4, 5]
    assert len(it.state.evaluations) == 8

    it = run(
        stages=(IMITATION,), rollout_replicas=1, heldout_rows=3, evaluation_prompts=2, evaluation_interval=2,
        policy_checkpoint_interval=2,
    )  # fmt: skip
    it.join("p0")
    it.join("r0")
    it.settle()
    it.resume(4)
    it.join("p0", step=4)
    it.join("r0")
    it.settle()
    assert it.state.outcome == "finished"
    kinds = sorted((record.version, record.loss is None) for record in it.state.evaluations)
    assert kinds == [(version, kind) for version in (0, 2, 4, 5) for kind in (False, True)]


def test_a_resumed_run_measures_what_it_lacks(run):
    it = run(
        stages=(IMITATION,), rollout_replicas=1, heldout_rows=3, evaluation_prompts=2, evaluation_interval=2,
        policy_checkpoint_interval=2,
    )  # fmt: skip
    it.join("p0")
    it.join("r0")
    it.settle("p0")
    assert [record.version for record in it.state.evaluations] == [0, 2, 4]
    it.resume(4)
    it.join("p0", step=4)
    it.join("r0")
    it.settle()
    assert [record.version for record in it.state.evaluations if record.accuracy is not None] == [4, 5]
    # Weights of before the checkpoint are gone, and with them the evaluations that had begun.
    assert it.state.status_details["evaluation"] == (
        "version 0 was lost before its evaluation was done; version 2 was lost before its evaluation was done"
    )

    it = imitating(run, evaluation_interval=2, policy_checkpoint_interval=2)
    while it.state.step < 3:
        it.follow()
    assert [record.version for record in it.state.evaluations] == [0, 2]
    it.state.evaluations.pop()
    it.resume(2)
    it.join("p0", step=2)
    it.follow()
    assert it.directive("p0").train.measures == (2,)
    it.settle()
    assert [record.version for record in it.state.evaluations] == [0, 2, 4, 5]


def test_a_run_that_goes_on_with_another_length_measures_its_new_end(run):
    it = run(stages=(IMITATION,), rollout_replicas=0, rewards=(), heldout_rows=3)
    it.join("p0")
    it.settle()
    assert [record.version for record in it.state.evaluations] == [0, 5]
    longer = attrs.evolve(
        it.state.settings,
        stages=(attrs.evolve(IMITATION, steps=9),),
        evaluation_interval=2,
        policy_checkpoint_interval=3,
    )
    it.resume(5, longer)
    it.join("p0", step=5)
    it.settle()
    assert (it.state.outcome, it.state.step, len(it.state.steps)) == ("finished", 9, 9)
    assert [record.version for record in it.state.evaluations] == [0, 5, 6, 8, 9]
    assert sorted(it.state.checkpoints.saved) == [5, 6, 9]
    assert it.state.ledger.consumed == 9 * IMITATION.prompts_per_step

    it = run(
        stages=(IMITATION,), rollout_replicas=1, heldout_rows=3, evaluation_prompts=2, evaluation_interval=4,
        policy_checkpoint_interval=2,
    )  # fmt: skip
    it.join("p0")
    it.join("r0")
    it.settle()
    shorter = attrs.evolve(it.state.settings, stages=(attrs.evolve(IMITATION, steps=2),))
    it.resume(2, shorter)
    it.join("p0", step=2)
    it.join("r0")
    it.settle()
    assert (it.state.outcome, it.state.step) == ("finished", 2)
    assert [record.version for record in it.state.evaluations if record.accuracy is not None] == [0, 2]
    assert [record.version for record in it.state.evaluations if record.loss is not None] == [0]
    assert it.state.status_details["evaluation"] == "the held-out loss at step 2 was not measured"


def test_the_best_checkpoint_has_the_best_accuracy_or_else_the_lowest_loss(run, subtests):
    it = run(
        stages=(IMITATION,), rollout_replicas=1, heldout_rows=3, evaluation_prompts=2, evaluation_interval=2,
        policy_checkpoint_interval=2,
    )  # fmt: skip
    it.join("p0")
    it.join("r0")
    it.settle()
    accuracies = {4: 0.9, 2: 0.95, 0: 0.1, 5: 0.2}
    it.state.evaluations[:] = [
        record if record.accuracy is None else attrs.evolve(record, accuracy=accuracies[record.version])
        for record in it.state.evaluations
    ]
    assert best_checkpoint(it.state) == 2
    # What other rewards scored does not compete.
    it.state.evaluations[:] = [
        attrs.evolve(record, outdated={"reward.0.plugin": 3} if record.version < 3 and record.is_of_rollouts else {})
        for record in it.state.evaluations
    ]
    assert best_checkpoint(it.state) == 4
    it.state.evaluations[:] = [record for record in it.state.evaluations if record.accuracy is None]
    assert best_checkpoint(it.state) == 5

    for loss, merit in [(0.5, -0.5), (math.inf, -math.inf), (math.nan, -math.inf)]:
        with subtests.test(loss=loss):
            it = imitating(run)
            it.report("p0", done(it.directive("p0").train, 0, loss=loss))
            record = it.state.evaluations[0]
            assert merits([record]) == {0: merit}
    # Of one scale: where one evaluation has no accuracy, the rewards of all count.
    right = attrs.evolve(record, loss=None, accuracy=0.5, reward=-0.1)
    partly = attrs.evolve(right, version=1, accuracy=None, reward=0.35)
    assert merits([right]) == {0: 0.5}
    assert merits([right, partly]) == {0: -0.1, 1: 0.35}


def test_a_loss_that_is_lacking_is_asked_for_again_or_taken_from_another_member(run):
    it = imitating(run, evaluation_interval=2)
    it.report("p0", done(it.directive("p0").train, 0))
    it.report("p0", done(it.directive("p0").train))
    assert it.directive("p0").train.measures == (2,)
    it.report("p0", done(it.directive("p0").train, 2))
    assert [record.version for record in it.state.evaluations] == [0, 2]
    assert "evaluation" not in it.state.status_details

    it = run(
        stages=(IMITATION,), rollout_replicas=0, policy_replicas=2, rewards=(), heldout_rows=3, evaluation_interval=1
    )
    it.join("p0")
    it.join("p1")
    it.follow()
    order = it.directive("p0").train
    generation = it.directive("p0").generation.generation
    assert order.measures == (0, 1)
    it.report("p1", done(order, 0, generation=generation))
    it.report("p0", done(order, 0, 1, generation=generation))
    assert [record.version for record in it.state.evaluations] == [0, 1]
    assert it.directive("p0").train.measures == (2,)


def test_losses_and_rows_that_were_not_measured_are_told(run):
    it = imitating(run)
    while (order := it.directive("p0").train) is not None:
        it.report("p0", done(order, *(version for version in order.measures if version < 5)))
    assert it.state.status_details["evaluation"] == "the held-out loss at step 5 was not measured"

    it = imitating(run)
    it.report("p0", done(it.directive("p0").train, 0, dropped=((1, "bad_row"),)))
    record = it.state.evaluations[0]
    assert (record.num_prompts, record.num_unscored, record.dropped) == (3, 1, {"bad_row": 1})
    assert it.state.status_details["held-out bad_row"] == "row 1"

    it = imitating(run)
    it.report("p0", done(it.directive("p0").train, 0, dropped=tuple((row, "bad_row") for row in range(3))))
    assert it.state.evaluations == []
    assert it.state.status_details["evaluation"] == "the held-out loss at step 0 was not measured"
