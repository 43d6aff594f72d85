"""Pools that share GPUs take turns."""

from __future__ import annotations

from cosmos_core.transport.reports import Slept


def follow(it, *names):
    for name in names:
        it.report(name, *it.fakes[name].follow(it.directive(name)))


def awake(it):
    return [name for name in sorted(it.state.replicas) if not it.directive(name).sleep]


def load(it, *names):
    """Replicas wake and load what they are told to; they finish nothing."""
    for name in names:
        it.fakes[name].is_awake = True
        it.report(name, *it.fakes[name]._load(it.directive(name)))


def begun(run, **changes):
    """A run whose rollout replicas have the turn, and the first weights."""
    it = run(takes_turns=True, rollout_replicas=2, **changes)
    for name in ("p0", "r0", "r1"):
        it.join(name)
    follow(it, "p0", "p0")
    assert (it.state.turn, awake(it)) == (1, ["r0", "r1"])
    load(it, "r0", "r1")
    return it


def test_a_pool_wakes_once_all_of_the_other_have_gone_to_sleep_in_this_turn(run):
    it = begun(run)
    for name in ("r0", "r1"):
        it.finish(name, it.leases(name)[0])
    assert (it.state.running.order.step, it.state.turn, awake(it)) == (1, 2, [])
    assert it.directive("r0").weights is None
    follow(it, "r0")
    assert it.state.replicas["r0"].version == -1
    it.report("r1", Slept(turn=0))
    assert awake(it) == [], "what it said before it was told to wake counts for nothing"
    follow(it, "r1")
    assert awake(it) == ["p0"]
    follow(it, "p0")
    assert (it.state.step, it.state.turn, awake(it)) == (1, 3, [])
    follow(it, "p0")
    assert awake(it) == ["r0", "r1"]
    assert it.directive("r0").weights.version == 1


def test_who_is_lost_sleeps(run):
    it = begun(run)
    for name in ("r0", "r1"):
        it.finish(name, it.leases(name)[0])
    follow(it, "r0")
    it.lose("r1")
    assert awake(it) == ["p0"]
    it.lose("p0")
    assert it.state.turn == 2, "rollout replicas do not wake before another one trains"


def test_a_sleeping_policy_wakes_for_the_checkpoint_of_a_stop(run):
    it = begun(run)
    it.stop()
    follow(it, "r0", "r1")
    assert awake(it) == ["p0"]
    follow(it, "p0")
    assert it.state.outcome == "stopped"


def test_an_evaluation_is_given_up_once_those_who_had_its_weights_have_slept(run):
    it = begun(run, evaluation_prompts=3, prompts=1, sync_max_staleness=1, policy_replicas=1)
    it.finish("r0", next(lease for lease in it.leases("r0") if lease.purpose == "train"))
    follow(it, "r0", "r1", "p0")
    assert (it.state.step, it.state.pending[0].version) == (1, 0)
    follow(it, "p0")
    load(it, "r0", "r1")
    assert it.state.replicas["r0"].version == 0, "the evaluation that was cut in two goes on"
    it.join("p1")
    it.lose("p0")
    assert it.state.pending[0].version == 0
    follow(it, "r0", "r1")
    assert not it.state.pending
    assert "version 0 was lost before its evaluation was done" in it.state.status_details["evaluation"]
    assert [lease for name in ("r0", "r1") for lease in it.leases(name) if lease.purpose == "evaluation"] == []
