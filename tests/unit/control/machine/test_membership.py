from __future__ import annotations

from cosmos_core.control.machine.events import RegroupDue
from cosmos_core.transport.reports import GenerationFailed, GenerationFormed, StepDone


def train_orders(it):
    return {name: it.directive(name).train for name in it.fakes if name.startswith("p")}


def ready(it, policies=2, **options):
    """A run whose first step is ordered and not done."""
    it = it(policy_replicas=policies, prompts=2, **options)
    it.start(policies=policies)
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    return it


def test_a_step_is_ordered_and_done_when_all_members_say_so(run):
    it = run(policy_replicas=2)
    it.join("p1")
    assert it.directive("p1").generation is None
    it.join("p0")
    order = it.directive("p0").generation
    assert order == it.directive("p1").generation
    assert (order.generation, order.members, order.transfer) == (1, ("p0", "p1"), False)
    assert order.store == it.fakes["p0"].endpoints["store"]

    it = run(policy_replicas=2, warmup=1)
    it.join("p0")
    it.join("p1")
    it.follow("p0")
    assert it.directive("p0").train is None
    assert it.directive("p0").publish == -1
    it.follow("p1")
    orders = train_orders(it)
    assert orders["p0"] == orders["p1"] is not None
    assert orders["p0"].shares == ((0, 2), (1,))

    it = ready(run)
    it.follow("p0")
    assert it.state.step == 0
    it.follow("p1")
    assert it.state.step == 1
    assert it.state.steps[0].metrics == {"loss": 1.0, "wait_s": 0.5}


def test_a_lost_member_makes_the_rest_repeat_the_step_unless_one_has_applied_it(run):
    it = ready(run, policies=3)
    before = it.directive("p0").train
    it.lose("p1")
    order = it.directive("p0").generation
    assert (order.generation, order.members) == (2, ("p0", "p2"))
    assert it.directive("p0").train is None
    it.follow("p0", "p2")
    again = it.directive("p2").train
    assert (again.step, again.attempt) == (1, 2)
    assert again.groups == before.groups
    assert len(again.shares) == 2
    it.follow("p0", "p2")
    assert it.state.step == 1
    assert it.state.fenced == {it.incarnations["p1"]: "p1: silent"}

    it = ready(run)
    it.follow("p1")
    it.lose("p0")
    assert it.state.step == 0
    it.follow("p1")
    assert it.state.step == 1
    assert it.state.steps[0].attempt == 1
    assert it.state.ledger.consumed == 2


def test_survivors_at_different_steps_are_brought_to_the_furthest_one(run):
    it = ready(run, policies=3)
    it.follow("p2")
    it.lose("p1")
    order = it.directive("p0").generation
    assert (order.members[order.source], order.transfer) == ("p2", True)
    it.follow("p2", "p0")
    assert it.state.step == 1
    assert it.fakes["p0"].digest == it.fakes["p2"].digest

    it = ready(run, policies=3)
    it.lose("p1")
    it.report("p0", GenerationFormed(generation=2, step=0))
    it.report("p2", GenerationFormed(generation=2, step=1))
    order = it.directive("p0").generation
    assert (order.generation, order.members[order.source], order.transfer) == (3, "p2", True)

    it = run(policy_replicas=2)
    it.join("p0")
    it.join("p1")
    it.report("p0", GenerationFormed(generation=1, step=4))
    it.report("p1", GenerationFormed(generation=1, step=0))
    assert it.state.fenced == {it.incarnations["p0"]: "p0: it holds the weights of step 4, but the run is at 0"}
    order = it.directive("p1").generation
    assert (order.generation, order.members, order.transfer) == (2, ("p1",), False)
    it.fakes.pop("p0").end()
    it.join("r0")
    it.settle()
    assert it.state.outcome == "finished"


def test_a_joiner_waits_for_the_step_boundary_and_replaces_one_of_its_name(run):
    it = ready(run, policies=1)
    it.join("p1")
    assert it.directive("p0").generation.members == ("p0",)
    assert it.directive("p1").generation is None
    it.follow("p0")
    assert it.state.step == 1
    order = it.directive("p1").generation
    assert (order.members, order.members[order.source], order.transfer) == (("p0", "p1"), "p0", True)
    it.follow("p0", "p1")
    assert it.fakes["p1"].digest == it.fakes["p0"].digest

    it = ready(run)
    old = it.incarnations["p1"]
    it.fakes["p1"].end()
    it.join("p1")
    assert old in it.state.fenced
    assert it.directive("p0").generation.generation == 2


def test_a_broken_group_is_formed_again_after_a_pause_and_not_for_ever(run):
    it = ready(run)
    it.report("p0", GenerationFailed(generation=1, reason="connection reset"))
    assert it.state.is_regrouping
    assert it.directive("p0").generation is None
    it.report("p1", GenerationFailed(generation=1, reason="connection reset"))
    assert it.state.num_regroups == 1
    it.apply(RegroupDue())
    assert it.directive("p0").generation.generation == 2
    it.follow("p0", "p1")
    assert it.directive("p0").train.attempt == 2
    assert it.state.num_regroups == 0

    it = run()
    it.join("p0")
    while not it.state.outcome:
        it.report("p0", GenerationFailed(generation=it.state.generation_number, reason="no route"))
        it.apply(RegroupDue())
    assert it.state.outcome == "failed"
    assert "no route" in it.state.reason


def test_what_comes_from_an_older_generation_does_not_finish_a_step(run, subtests):
    for fence in [{"generation": 1}, {"attempt": 1}]:
        with subtests.test(fence=fence):
            it = ready(run)
            it.lose("p1")
            it.follow("p0")
            order = it.directive("p0").train
            assert order.attempt == 2
            done = {"step": 1, "attempt": 2, "generation": 2, "skipped": False, "metrics": {}} | fence
            it.report("p0", StepDone(**done))
            assert it.state.step == 0
