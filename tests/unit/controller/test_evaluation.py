from __future__ import annotations

import pytest

from cosmos_core.controller.settings import StageSettings
from cosmos_core.transport.messages import GroupFailed


def test_held_out_rows_come_before_training_and_are_pinned(run):
    it = run(evaluation_prompts=3, capacity=2)
    it.start()
    held_out = [lease for lease in it.leases() if lease.purpose == "evaluation"]
    assert [(lease.position, lease.row, lease.version) for lease in held_out] == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]
    assert it.leases()[0].purpose == "evaluation"
    # Three sequences leave room for one group of four among eight.
    assert [lease.position for lease in it.leases() if lease.purpose == "train"] == [0]


def test_rollout_replicas_stay_at_the_version_that_is_evaluated(run):
    it = run(evaluation_prompts=2, prompts=1, max_staleness=1, steps=5)
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


def test_a_replica_at_another_version_gets_no_held_out_rows(run):
    it = run(evaluation_prompts=2)
    it.start()
    it.join("r1")
    assert it.leases("r1") == []


def test_accuracy_counts_unscored_rows_as_not_right(run, make_sample):
    it = run(evaluation_prompts=4, rewards=("right", "short"))
    it.start()
    leases = it.leases()
    it.finish("r0", leases[0], make_sample(reward=1.0, text="four"))
    it.finish("r0", leases[1], make_sample(reward=0.5, status="truncated", text="five"))
    it.finish("r0", leases[2], make_sample(status="reward_timeout", text="six"))
    it.report("r0", GroupFailed(lease=leases[3].lease, reason="too_long", detail=""))
    (done,) = it.state.evaluations
    assert done.version == 0
    assert done.accuracy == pytest.approx(1.5 / 4)
    assert done.reward == pytest.approx(1.5 / 2)
    assert (done.num_prompts, done.num_unscored, done.num_truncated) == (4, 2, 1)
    assert [(each.row, each.text) for each in done.completions] == [(0, "four"), (1, "five"), (2, "six")]
    assert it.state.ledger.samples.generated == 0


def test_a_completion_of_other_weights_does_not_count(run, make_sample):
    it = run(evaluation_prompts=1)
    it.start()
    it.finish("r0", it.leases()[0], make_sample(version=0, newest=1))
    (done,) = it.state.evaluations
    assert (done.accuracy, done.num_unscored) == (0.0, 1)


def test_only_the_first_completions_are_kept(run):
    it = run(evaluation_prompts=12, capacity=9)
    it.start()
    for lease in reversed([lease for lease in it.leases() if lease.purpose == "evaluation"]):
        it.finish("r0", lease)
    assert [each.row for each in it.state.evaluations[0].completions] == list(range(8))


def test_rows_of_a_lost_replica_are_leased_again(run):
    it = run(evaluation_prompts=16, num_rollouts=2, capacity=3)
    it.start(rollouts=2)
    rows = {name: [lease.row for lease in it.leases(name) if lease.purpose == "evaluation"] for name in ("r0", "r1")}
    assert rows == {"r0": list(range(12)), "r1": [12, 13, 14, 15]}
    it.lose("r0")
    taken = [lease.row for lease in it.leases("r1") if lease.purpose == "evaluation"]
    assert len(taken) == 12
    assert sorted([*taken, *it.state.pending[0].queued]) == list(range(16))


def test_training_does_not_wait_for_an_evaluation(run):
    it = run(evaluation_prompts=2, prompts=1, max_staleness=1)
    it.start()
    training = [lease for lease in it.leases() if lease.purpose == "train"]
    for lease in training[:2]:
        it.finish("r0", lease)
        it.train()
    assert it.state.step == 2
    assert it.state.evaluations == []


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


def test_an_evaluation_of_weights_that_are_gone_is_given_up(run):
    it = run(evaluation_prompts=2, prompts=1, max_staleness=1, num_policies=2)
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
