from __future__ import annotations

from cosmos_core.transport.reports import WeightsLoaded, WeightsPublished, WeightsRejected


def loaded(version, digest):
    return WeightsLoaded(version=version, digest=digest, transfer_s=0.0, paused_s=0.0, nbytes=1)


def test_the_initial_weights_and_the_last_of_a_warm_up_are_published(run):
    it = run()
    it.join("p0")
    it.join("r0")
    it.follow("p0")
    assert it.directive("p0").publish == 0
    it.follow("p0")
    target = it.directive("r0").weights
    assert (target.version, target.digest, target.hosts) == (0, "initial", ("host",))
    assert target.sources == (it.fakes["p0"].endpoints["weights"],)

    it = run(warmup=2)
    it.join("p0")
    it.follow("p0")
    assert it.directive("p0").publish == -1
    assert not it.directive("p0").train.publish
    it.follow("p0")
    assert it.directive("p0").train.publish
    it.follow("p0")
    assert (it.state.step, it.directive("p0").publish) == (2, 2)
    assert list(it.state.published) == [2]


def test_weights_with_a_wrong_digest_or_of_a_forgotten_version_do_not_count(run):
    it = run()
    it.start()
    it.report("r0", loaded(0, "other"))
    replica = it.state.replicas["r0"]
    assert (replica.version, replica.rejections) == (-1, 1)
    it.report("r0", WeightsRejected(version=0, digest="other", expected="initial", reason="w: what arrived is wrong"))
    assert replica.rejections == 2
    told = it.state.status_details["weights"]
    assert told == "r0: version 0 loaded with digest other, not initial: w: what arrived is wrong"
    it.report("r0", loaded(0, "initial"))
    assert replica.version == 0

    it = run(rollout_replicas=2, prompts=1, sync_max_staleness=1, steps=9)
    it.start(rollouts=2)
    it.join("r2")
    slow = it.directive("r2").weights
    for _step in range(4):
        it.finish("r0", it.leases("r0")[0])
        it.train()
        for name in ("r0", "r1"):
            it.report(name, *it.fakes[name]._load(it.directive(name)))
    assert slow.version not in it.state.published
    it.report("r2", loaded(slow.version, slow.digest))
    replica = it.state.replicas["r2"]
    assert (replica.version, replica.rejections, replica.is_doubted) == (-1, 0, False)
    assert it.leases("r2") == []
    it.report("r2", *it.fakes["r2"]._load(it.directive("r2")))
    assert replica.version == it.state.target


def test_weights_count_once_their_step_is_done_everywhere_and_must_not_differ(run):
    it = run(policy_replicas=2)
    it.start(policies=2)
    it.report("p0", WeightsPublished(version=1, digest="a", nbytes=1))
    it.report("p1", WeightsPublished(version=1, digest="b", nbytes=1))
    assert it.state.outcome == "failed"
    assert "diverged" in it.state.reason

    it = run(policy_replicas=2)
    it.start(policies=2)
    it.report("p0", WeightsPublished(version=1, digest="a", nbytes=1))
    assert it.directive("r0").weights.version == 0

    it = run(policy_replicas=2, prompts=1)
    it.start(policies=2)
    it.finish("r0", it.leases()[0])
    it.report("p0", WeightsPublished(version=1, digest="of another sum of gradients", nbytes=1))
    it.lose("p0")
    assert list(it.state.published) == [0]
    it.settle("p1")
    assert (it.state.outcome, it.state.step) == ("", 1)
    assert it.state.published[1].digest == it.fakes["p1"].digest


def test_versions_are_kept_while_a_replica_may_be_loading_them_and_not_for_ever(run):
    it = run(rollout_replicas=2, prompts=1, sync_max_staleness=9, steps=9)
    it.start(rollouts=2)
    for step in (1, 2, 3):
        it.finish("r0", it.leases("r0")[0])
        it.train()
        assert it.state.step == step
        it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
    assert it.state.targets == [1, 2, 3]
    assert it.directive("p0").retain == 1
    digest = it.state.published[2].digest
    it.report("r1", loaded(2, digest))
    assert it.directive("p0").retain == 3
    assert list(it.state.published) == [3]

    it = run(rollout_replicas=2, prompts=1, sync_max_staleness=1, steps=9)
    it.start(rollouts=2)
    it.join("r2")
    for step in range(1, 8):
        it.finish("r0", it.leases("r0")[0])
        it.train()
        for name in ("r0", "r1"):
            it.report(name, *it.fakes[name]._load(it.directive(name)))
        assert it.state.step == step
    assert it.state.targets == [5, 6, 7]
    assert it.directive("p0").retain == 5
    it.report("r2", *it.fakes["r2"]._load(it.directive("r2")))
    assert it.state.replicas["r2"].version == 7


def test_what_replicas_have_is_kept_while_changes_of_it_may_be_sent(run, subtests):
    for keeps_base, kept in [(False, [[1], [2], [2, 3]]), (True, [[0, 1], [1, 2], [1, 2, 3]])]:
        with subtests.test(keeps_base=keeps_base):
            it = run(rollout_replicas=2, prompts=1, sync_max_staleness=9, steps=9, sync_delta=keeps_base)
            it.start(rollouts=2)
            found = []
            for step, names in ((1, ("r0", "r1")), (2, ("r0",)), (3, ("r0",))):
                it.finish("r0", it.leases("r0")[0])
                it.train()
                assert it.state.target == step
                found.append(list(it.state.targets))
                assert it.directive("p0").retain == it.state.targets[0]
                for name in names:
                    it.report(name, *it.fakes[name]._load(it.directive(name)))
            assert found == kept
            it.report("r1", loaded(3, it.state.published[3].digest))
            # Nobody needs what no replica has any more.
            assert it.state.targets == [3]


def test_the_nearest_source_comes_first_and_a_lost_one_not_at_all(run):
    it = run(policy_replicas=2)
    it.start(policies=2)
    it.state.replicas["p0"].host = "far"
    assert it.directive("r0").weights.hosts == ("host", "far")

    it = run(policy_replicas=2)
    it.start(policies=2)
    it.lose("p0")
    assert it.directive("r0").weights.sources == (it.fakes["p1"].endpoints["weights"],)


def test_weights_are_published_off_schedule_when_their_holders_are_gone(run):
    it = run(policy_replicas=1, prompts=1, sync_interval=2, sync_max_staleness=3, steps=9)
    it.start()
    it.finish("r0", it.leases()[0])
    it.train()
    it.join("p1")
    it.settle("p0", "p1")
    assert (it.state.step, it.state.target) == (1, 0)
    it.lose("p0")
    it.join("r1")
    assert it.directive("r1").weights is None
    it.settle("p1")
    assert it.directive("r1").weights.version == 1
