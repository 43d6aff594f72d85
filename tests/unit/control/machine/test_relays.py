from __future__ import annotations

import pytest

from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected


def loaded(version, digest="initial", endpoint=""):
    return WeightsLoaded(version=version, digest=digest, transfer_s=0.0, paused_s=0.0, nbytes=1, endpoint=endpoint)


@pytest.fixture
def make_chain(run):
    """Three rollout replicas, each of which reads from the one before; nothing is loaded yet."""

    def make():
        it = run(rollout_replicas=3, sync_fan_out=1, shares_memory=False, prompts=1, sync_max_staleness=9, steps=9)
        for name in ("p0", "r0", "r1", "r2"):
            it.join(name)
        it.settle("p0")
        return it

    return make


def load(it, *names):
    for name in names:
        it.report(name, *it.fakes[name]._load(it.directive(name)))


def train(it, name="r0"):
    it.finish(name, it.leases(name)[0])
    it.train()


def policy(it):
    return (it.fakes["p0"].endpoints["weights"],)


def test_a_replica_reads_from_its_parent_once_that_has_a_version(make_chain):
    chain = make_chain()
    first, second, third = (chain.directive(name) for name in ("r0", "r1", "r2"))
    assert first.weights.sources == policy(chain)
    assert (second.weights, third.weights) == (None, None)
    assert [each.relaying.level for each in (first, second, third)] == [0, 1, 2]
    assert [each.relaying.keep for each in (first, second, third)] == [True, True, False]
    assert first.relaying.reserve is None
    assert second.relaying.reserve == third.relaying.reserve == first.weights
    load(chain, "r0")
    target = chain.directive("r1").weights
    assert (target.version, target.digest, target.hosts) == (0, "initial", ("host",))
    assert target.sources == (chain.fakes["r0"].copies,)
    assert chain.directive("r2").weights is None
    load(chain, "r1", "r2")
    assert chain.directive("r2").weights.sources == (chain.fakes["r1"].copies,)
    assert {each.version for each in chain.state.named("rollout")} == {0}

    chain = make_chain()
    chain.report("r0", loaded(0))
    assert chain.directive("r1").weights.sources == policy(chain)
    load(chain, "r1")
    assert chain.directive("r2").weights.sources == (chain.fakes["r1"].copies,)

    chain = make_chain()
    load(chain, "r0")
    train(chain)
    load(chain, "r0")
    train(chain)
    # r0 has version 1 and the newest is 2; r1 has none at all.
    assert (chain.state.target, chain.directive("r1").weights.version) == (2, 1)
    assert chain.directive("r1").relaying.reserve.version == 2
    load(chain, "r1", "r0")
    assert chain.directive("r1").weights.version == 2
    assert chain.directive("r2").weights.version == 1


def test_copies_are_kept_as_long_as_somebody_may_read_them(make_chain):
    chain = make_chain()
    load(chain, "r0", "r1", "r2")
    train(chain)
    load(chain, "r0", "r1")
    retain = [chain.directive(name).relaying.retain for name in ("r0", "r1", "r2")]
    assert (retain, chain.state.targets) == ([1, 1, 2], [1])
    assert [sorted(each.kept) for each in chain.state.named("rollout")] == [[1], [1], []]


def test_a_refused_replica_passes_nothing_on(make_chain):
    chain = make_chain()
    load(chain, "r0")
    chain.report("r1", WeightsRejected(version=0, digest="x", expected="initial"))
    assert chain.state.parents == {"r2": "r0"}
    assert chain.directive("r1").weights.sources == policy(chain)
    assert chain.directive("r2").weights.sources == (chain.fakes["r0"].copies,)
    chain.report("r0", loaded(0, "another digest"))
    assert (chain.state.parents, chain.state.replicas["r0"].kept) == ({}, {})
    assert chain.directive("r2").weights.sources == policy(chain)
    chain.report("r0", loaded(0))
    load(chain, "r1")
    assert chain.state.parents == {"r1": "r0", "r2": "r1"}


def test_who_is_lost_or_late_is_replaced_by_whoever_has_a_copy(make_chain):
    chain = make_chain()
    load(chain, "r0", "r1")
    chain.lose("r1")
    assert chain.directive("r2").weights.sources == (chain.fakes["r0"].copies,)
    chain.lose("r0")
    assert chain.directive("r2").weights.sources == policy(chain)
    assert chain.directive("r2").relaying.retain == 1

    chain = make_chain()
    load(chain, "r0", "r1", "r2")
    chain.join("r3")
    # r2 keeps no copy of what it loaded before anybody read from it.
    assert chain.state.parents["r3"] == "r2"
    assert chain.directive("r3").weights.sources == (chain.fakes["r1"].copies,)
    load(chain, "r3")
    train(chain)
    load(chain, "r0", "r1", "r2")
    assert chain.directive("r3").weights.sources == (chain.fakes["r2"].copies,)

    chain = make_chain()
    load(chain, "r0")
    chain.join("p1")
    chain.lose("p0")
    assert chain.directive("r0").weights is None
    assert chain.directive("r1").weights.sources == (chain.fakes["r0"].copies,)
    assert chain.directive("r1").relaying.reserve is None


def test_before_all_have_joined_each_reads_from_the_one_before(run):
    it = run(rollout_replicas=3, sync_fan_out=1, shares_memory=False)
    it.join("p0")
    it.join("r0")
    it.settle("p0")
    load(it, "r0")
    it.join("r1")
    assert it.directive("r1").weights.sources == (it.fakes["r0"].copies,)
    load(it, "r1")
    it.join("r2")
    assert it.directive("r2").weights.sources == (it.fakes["r1"].copies,)
    load(it, "r2")
    assert it.state.replicas["r2"].kept == {}

    it = run(rollout_replicas=3, sync_fan_out=1)
    it.join("p0", host="a")
    it.join("r0", host="a")
    it.join("r1", host="b")
    it.settle("p0")
    load(it, "r0", "r1")
    assert not it.state.has_rollouts
    assert [it.directive(name).relaying.keep for name in ("r0", "r1")] == [False, True]
    assert [sorted(it.state.replicas[name].kept) for name in ("r0", "r1")] == [[], [0]]


def test_few_replicas_those_beside_the_policy_and_a_disk_need_no_tree(run):
    it = run(rollout_replicas=3, shares_memory=False)
    it.start(rollouts=3)
    assert it.state.parents == {}
    for name in ("r0", "r1", "r2"):
        directive = it.directive(name)
        assert directive.weights.sources == policy(it)
        assert (directive.relaying.keep, directive.relaying.retain) == (False, 1)

    it = run(rollout_replicas=3, sync_fan_out=0)
    it.start(rollouts=3)
    assert not it.state.parents
    assert not any(it.directive(name).relaying.keep for name in ("r0", "r1", "r2"))

    it = run(rollout_replicas=4, sync_fan_out=1)
    it.join("p0", host="a")
    for name, host in (("r0", "a"), ("r1", "b"), ("r2", "a"), ("r3", "b")):
        it.join(name, host=host)
    assert it.state.parents == {"r3": "r1"}


def test_one_replica_of_each_rack_reads_from_afar(run):
    it = run(rollout_replicas=4, sync_fan_out=2, shares_memory=False)
    it.join("p0", host="a", rack="1")
    for name, host, rack in (("r0", "b", "2"), ("r1", "c", "3"), ("r2", "d", "2"), ("r3", "e", "3")):
        it.join(name, host=host, rack=rack)
    assert it.state.parents == {"r2": "r0", "r3": "r1"}
    it.settle("p0")
    assert it.directive("r0").weights.racks == ("1",)
    load(it, "r0")
    assert it.directive("r2").weights.racks == ("2",)
