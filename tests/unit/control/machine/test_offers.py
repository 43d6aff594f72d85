from __future__ import annotations

from cosmos_core.control.connections import Lines
from cosmos_core.control.machine import directives, relays
from cosmos_core.control.machine.directives import Offers, directive_for
from cosmos_core.transport.directives import RolloutDirective


def crowd(run):
    """Two policy replicas, and rollout replicas on five hosts; one of these and one rack are the policy's, too."""
    it = run(policy_replicas=2, rollout_replicas=10, sync_fan_out=3, shares_memory=False)
    it.join("p0", host="a", rack="1")
    it.join("p1", host="b", rack="2")
    for index in range(10):
        it.join(f"r{index}", host="acdef"[index % 5], rack="13223"[index % 5])
    it.settle("p0", "p1")
    return it


def test_what_is_shared_by_a_pass_is_what_each_would_get_alone(run):
    it = crowd(run)
    shared, names = Offers(it.state), sorted(it.state.replicas)
    assert [directive_for(it.state, name, shared) for name in names] == [it.directive(name) for name in names]
    first = [name for name in names if name.startswith("r") and name not in it.state.parents]
    nearest = {it.state.replicas[name].rack: it.directive(name).weights.hosts[0] for name in first}
    assert nearest["1"] == "a"
    assert nearest["2"] == "b"


def test_a_pass_over_all_replicas_looks_at_the_policy_once(run, monkeypatch):
    it = crowd(run)
    lines, places, sorted_for = Lines(it.state, 0.0), [], []
    policy_places, distances = relays.policy_places, directives.distances
    monkeypatch.setattr(relays, "policy_places", lambda state: places.append(1) or policy_places(state))
    monkeypatch.setattr(directives, "distances", lambda *of: sorted_for.append(of[1]) or distances(*of))
    it.state.touch()
    lines.due(0.0)
    # Once for each place that matters: in the policy's rack 1 and on its host a, in its rack 2, and elsewhere.
    assert (len(places), len(sorted_for)) == (1, 3)


def test_a_reserve_is_the_very_target_of_the_first_level(run):
    it = crowd(run)
    shared = Offers(it.state)
    found = [directive_for(it.state, f"r{index}", shared) for index in range(10)]
    assert all(isinstance(each, RolloutDirective) for each in found)
    reserves = {id(each.relaying.reserve) for each in found if each.relaying.level}
    assert reserves
    assert len(reserves) <= 3
