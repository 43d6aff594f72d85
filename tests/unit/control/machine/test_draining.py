from __future__ import annotations

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Commanded
from cosmos_core.transport.messages import REQUEST, Drain
from cosmos_core.transport.reports import Left


def drain(it, name):
    refusal = core.refusal(it.state, Drain(name=name))
    if not refusal:
        it.apply(Commanded(ident=f"drain {name}", request=REQUEST.encode(Drain(name=name))))
    return refusal


def test_a_rollout_replica_finishes_what_it_has_keeps_its_payloads_and_leaves(run):
    it = run(rollout_replicas=2)
    it.start(rollouts=2)
    before = it.leases("r1")
    assert before
    assert drain(it, "r1") == ""
    for lease in list(it.leases("r0")):
        it.finish("r0", lease)
    assert it.leases("r1") == before
    assert not it.directive("r1").leave

    it = run(rollout_replicas=2, prompts=2)
    it.start(rollouts=2)
    drain(it, "r1")
    for lease in it.leases("r1"):
        it.finish("r1", lease)
    assert not it.leases("r1")
    assert it.directive("r1").hold
    assert not it.directive("r1").leave
    while not it.directive("r1").leave:
        it.train()
        for lease in it.leases("r0"):
            it.finish("r0", lease)
    assert not it.directive("r1").hold
    it.follow("r1")
    assert "r1" not in it.state.replicas
    assert "r1" not in it.fakes
    assert it.state.departed == {"r1"}
    assert it.state.fenced == {it.incarnations["r1"]: "r1: it has left, as it was asked to"}
    it.settle()
    assert it.state.outcome == "finished"
    assert "lost" not in it.state.ledger.samples.dropped
    assert not it.state.draining


def test_held_out_rows_waves_and_copies_of_one_that_drains_are_taken_care_of(run):
    it = run(rollout_replicas=2, evaluation_prompts=4)
    it.start(rollouts=2)
    rows = [lease for lease in it.leases("r0") if lease.purpose == "evaluation"]
    assert len(rows) == 4
    drain(it, "r0")
    for lease in it.leases("r0"):
        it.finish("r0", lease)
    (done,) = it.state.evaluations
    assert (done.num_prompts, done.num_unscored) == (4, 0)

    it = run(rollout_replicas=2, synchronous=True, sync_max_staleness=0)
    it.start(rollouts=2)
    for name in ("r0", "r1"):
        for lease in it.leases(name):
            it.finish(name, lease)
    drain(it, "r1")
    it.settle()
    assert it.state.outcome == "finished"
    assert "r1" not in it.state.replicas

    it = run(rollout_replicas=3, sync_fan_out=1, shares_memory=False)
    it.start(rollouts=3)
    assert "r0" in it.state.parents.values()
    drain(it, "r0")
    assert "r0" not in {*it.state.parents, *it.state.parents.values()}
    it.settle()
    assert it.state.outcome == "finished"


def test_a_policy_replica_leaves_at_a_step_boundary_once_its_weights_are_with_others(run):
    it = run(policy_replicas=2, prompts=2)
    it.start(policies=2)
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    assert it.directive("p0").train is not None
    drain(it, "p0")
    assert it.directive("p0").train is not None
    it.follow("p0")
    it.follow("p1")
    assert it.state.step == 1
    assert it.directive("p1").generation.members == ("p1",)
    assert it.directive("p0").generation is None
    assert not it.directive("p0").leave
    it.follow("p1")
    assert it.directive("p0").leave
    it.follow("p0")
    assert it.state.departed == {"p0"}
    it.settle()
    assert it.state.outcome == "finished"
    assert [record.attempt for record in it.state.steps] == [1, 1, 1]

    it = run(policy_replicas=2, prompts=2)
    it.start(policies=2)
    drain(it, "p0")
    it.lose("p1")
    it.follow("p0")
    assert it.directive("p0").generation.members == ("p0",)
    it.join("p2")
    it.settle()
    assert it.state.outcome == "finished"
    assert "p0" not in it.state.replicas
    assert it.fakes["p2"].step == it.state.step

    it = run(policy_replicas=1, rollout_replicas=2, sync_interval=4, sync_max_staleness=9)
    it.join("p0")
    it.join("r0")
    it.join("r1")
    it.follow("p0")
    it.follow("p0")
    it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
    it.join("p1")
    for _ in range(3):
        it.follow("p0", "p1")
    assert it.directive("p0").generation.members == ("p0", "p1")
    it.state.published[0].sources.discard("p1")
    drain(it, "p0")
    it.follow("p1")
    assert it.directive("p1").generation.members == ("p1",)
    assert not it.directive("p0").leave
    it.report("r1", *it.fakes["r1"]._load(it.directive("r1")))
    assert it.directive("p0").leave


def test_one_that_left_may_join_again_and_one_that_is_lost_is_lost(run):
    it = run(rollout_replicas=2)
    it.start(rollouts=2)
    drain(it, "r1")
    for lease in it.leases("r1"):
        it.finish("r1", lease)
    while "r1" in it.state.replicas:
        it.follow()
    it.join("r1")
    assert it.state.departed == set()
    assert it.state.draining == set()
    assert it.state.replicas["r1"].role == "rollout"
    it.settle()
    assert it.state.outcome == "finished"

    it = run(rollout_replicas=2)
    it.start(rollouts=2)
    drain(it, "r1")
    it.lose("r1")
    assert it.state.draining == it.state.departed == set()
    it.settle()
    assert it.state.outcome == "finished"

    it = run(rollout_replicas=2)
    it.start(rollouts=2)
    assert it.leases("r1")
    it.report("r1", Left())
    assert it.state.ledger.queued


def test_what_cannot_be_is_refused_and_a_second_request_changes_nothing(run, subtests):
    for name, words in [
        ("rollout-7", "rollout-7 is not in this run, which has p0, p1, r0"),
        ("r0", "r0 is the last rollout replica that stays"),
    ]:
        with subtests.test(name=name):
            it = run(policy_replicas=2)
            it.start(policies=2)
            assert words in drain(it, name)
            assert not it.state.draining

    it = run(policy_replicas=2)
    it.start(policies=2)
    assert drain(it, "p0") == ""
    assert "p1 is the last policy replica that stays" in drain(it, "p1")

    it = run(policy_replicas=2)
    it.join("p0")
    assert "the run has not begun, as it waits for 1 of 2 policy replicas" in drain(it, "p0")

    it = run(rollout_replicas=2)
    it.start(rollouts=2)
    drain(it, "r1")
    before = it.directive("r1")
    assert drain(it, "r1") == ""
    assert it.directive("r1") == before
