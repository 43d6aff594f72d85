"""Many rollout replicas come and go one by one: the tree of those that pass weights on moves few of them."""

from __future__ import annotations

import random

import pytest

from cosmos_core.control.machine import relays
from cosmos_core.weights import topology


@pytest.fixture
def crowd(run):
    """One policy replica and 24 rollout replicas on hosts of two; each serves three at most."""
    it = run(rollout_replicas=24, sync_fan_out=3, shares_memory=False)
    it.join("p0", host="p", rack="0")
    for index in range(24):
        it.join(f"r{index}", host=f"h{index // 2}", rack=f"{index // 8}")
    it.settle("p0")
    return it


def depth_of(it, name):
    depth = 1
    while name := it.state.parents.get(name, ""):
        depth += 1
    return depth


def test_who_comes_is_put_where_there_is_room_and_nobody_else_is_moved(crowd):
    before = dict(crowd.state.parents)
    crowd.join("r99", host="h9", rack="1")
    assert {name: above for name, above in crowd.state.parents.items() if name != "r99"} == before
    assert crowd.state.parents["r99"] in before.values() or crowd.state.parents["r99"] in before
    assert depth_of(crowd, "r99") <= topology.least_depth(25, 3)


def test_when_one_is_lost_only_those_that_read_from_it_are_moved(crowd):
    before = dict(crowd.state.parents)
    (lost, *_) = (name for name in sorted(crowd.state.readers) if name)
    orphans = set(crowd.state.readers[lost])
    assert orphans
    crowd.lose(lost)
    moved = {name for name, above in crowd.state.parents.items() if before.get(name) != above}
    assert moved <= orphans
    assert all(crowd.state.parents.get(name) != lost for name in orphans)


def test_who_passes_on_goes_on_doing_so_when_its_only_reader_is_replaced(run):
    it = run(rollout_replicas=12, sync_fan_out=1, shares_memory=False)
    it.join("p0", host="p")
    for index in range(12):
        it.join(f"r{index:02}")
    it.settle("p0")
    for index in range(12):
        name = f"r{index:02}"
        it.report(name, *it.fakes[name]._load(it.directive(name)))
    it.lose("r05")
    assert it.state.parents["r06"] == "r04"
    assert it.state.replicas["r04"].kept == {0: it.fakes["r04"].copies}


def test_the_tree_is_laid_out_anew_once_a_quarter_has_changed(crowd, monkeypatch):
    laid_out = []
    arrange = relays.arrange
    monkeypatch.setattr(relays, "arrange", lambda state: laid_out.append(state.num_moves) or arrange(state))
    for index in range(24):
        crowd.join(f"s{index}", host=f"s{index}", rack="7")
    assert laid_out == [9, 12]
    assert crowd.state.num_moves == 3


def test_whatever_happens_readers_are_few_and_the_tree_has_few_levels(crowd):
    rng = random.Random(4)
    for number in range(60):
        names = sorted(crowd.state.members["rollout"])
        if rng.random() < 0.5 and len(names) > 4:
            crowd.lose(rng.choice(names))
        else:
            crowd.join(f"t{number}", host=f"h{rng.randrange(9)}", rack=str(rng.randrange(3)))
        state = crowd.state
        assert max(map(len, state.readers.values())) <= 3
        deepest = max(depth_of(crowd, name) for name in state.members["rollout"])
        assert deepest <= topology.least_depth(len(state.members["rollout"]), 3) + 2


def test_a_crowd_joins_without_a_pass_over_everybody_each_time(run, monkeypatch):
    looks = []
    parents = topology.parents
    monkeypatch.setattr(topology, "parents", lambda *given: looks.append(len(given[0])) or parents(*given))
    it = run(rollout_replicas=300, sync_fan_out=8, shares_memory=False)
    it.join("p0", host="p")
    for index in range(300):
        it.join(f"r{index}", host=f"h{index}")
    assert sum(looks) < 7 * 300
