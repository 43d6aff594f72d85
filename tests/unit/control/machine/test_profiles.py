from __future__ import annotations

import pytest

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Commanded
from cosmos_core.transport.messages import REQUEST, Profile, Role
from cosmos_core.transport.reports import Profiled


def profile(it, role: Role = "policy", ranks=(0,), steps=2):
    request = Profile(role=role, ranks=ranks, steps=steps)
    refusal = core.refusal(it.state, request)
    if not refusal:
        it.apply(Commanded(ident=f"asked {len(it.events)}", request=REQUEST.encode(request)))
    return refusal


def started(run, **options):
    it = run(policy_replicas=2, rollout_replicas=2, steps=4, **options)
    it.start(policies=2, rollouts=2)
    return it


def test_each_replica_gets_its_own_ranks_until_it_has_told(run):
    it = started(run)
    it.state.replicas["p0"].endpoints["weights"] = "tcp://a:1@host@ tcp://a:2@host@"
    assert profile(it, ranks=(2, 0, 2)) == ""
    orders = {name: it.directive(name).profile for name in it.fakes}
    assert (orders["p0"].ranks, orders["p1"].ranks) == ((0,), (0,))
    assert {orders["p0"].ident} == {orders["p1"].ident} == {it.state.profile.ident}
    assert (orders["p0"].first, orders["p0"].steps) == (it.state.step + 1, 2)
    assert orders["r0"] is orders["r1"] is None
    it.report("p0", Profiled(ident="of an older request", traces=("x",)))
    assert it.directive("p0").profile is not None
    it.report("p0", Profiled(ident=it.state.profile.ident, traces=("a", "b")))
    assert it.directive("p0").profile is None
    assert "p1" in profile(it)
    it.lose("p1")
    assert it.state.profile.traces == ["a", "b"]
    assert it.state.profile.problems == {"p1": "lost before it had traced all: silent"}
    assert profile(it, "rollout", ranks=(1,)) == ""
    assert it.directive("r1").profile.ranks == (0,)


def test_a_step_that_was_ordered_is_not_traced(run):
    it = started(run, prompts=2)
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    assert it.state.running is not None
    assert profile(it) == ""
    assert it.directive("p0").profile.first == it.state.step + 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"steps": 0}, "a profile of 0 steps"),
        ({"ranks": (0, 7)}, r"no rank 7 among the policy processes, which are 0 \(p0\), 1 \(p1\)"),
        ({"role": "rollout", "ranks": (2,)}, r"no rank 2 among the rollout processes, which are 0 \(r0\), 1 \(r1\)"),
        ({"ranks": ()}, "no rank"),
    ],
)
def test_a_profile_of_nothing_is_refused(run, asked, words):
    it = started(run)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(profile(it, **asked))
    assert it.state.profile is None


def test_when_no_step_is_left_the_policy_is_not_traced(run):
    it = started(run)
    it.settle()
    assert profile(it) == "the run is over (finished)"
    it.state.outcome = ""
    assert "no step is left" in profile(it)
