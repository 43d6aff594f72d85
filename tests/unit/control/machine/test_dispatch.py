from __future__ import annotations

from cosmos_core.transport.reports import GroupFailed


def positions(it, name="r0"):
    return [lease.position for lease in it.leases(name)]


def test_nothing_is_leased_before_all_replicas_have_joined_and_loaded(run):
    it = run(rollout_replicas=2)
    it.start(rollouts=1)
    assert it.state.replicas["r0"].version == 0
    assert it.leases() == []
    it.start(policies=0, rollouts=0)
    it.join("r1")
    assert positions(it) == [0, 1, 2]

    it = run()
    it.join("p0")
    it.join("r0")
    assert it.leases() == []
    assert it.directive("r0").weights is None


def test_async_leases_fill_replicas_up_to_capacity_the_least_busy_first(run):
    it = run(capacity=3, sync_max_staleness=9, steps=9, rollout_replicas=2)
    it.start(rollouts=2)
    assert positions(it, "r0") == [0, 1, 2]
    assert positions(it, "r1") == [3, 4, 5]

    it = run(capacity=3, sync_max_staleness=0, steps=9, prompts=4, rollout_replicas=2)
    it.start(rollouts=2)
    assert (positions(it, "r0"), positions(it, "r1")) == ([0, 1, 2], [3])
    for lease in (*it.leases("r0"), *it.leases("r1")):
        it.finish("r0" if lease in it.leases("r0") else "r1", lease, drop="equal_rewards")
    # Each drop makes room for one, which goes to whoever has less to do.
    assert sorted(map(len, (it.leases("r0"), it.leases("r1")))) == [2, 2]


def test_async_leases_only_what_will_be_trained_and_fresh(run):
    it = run(capacity=99, sync_max_staleness=2, steps=9, prompts=2)
    it.start()
    # Version 0 may train steps 1, 2 and 3: the weights trained are then 0, 1 and 2.
    assert positions(it) == [0, 1, 2, 3, 4, 5]
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    it.train()
    assert it.state.step == 1
    assert len(it.leases()) == 4
    it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
    assert positions(it) == [2, 3, 4, 5, 6, 7]

    it = run(capacity=99, sync_max_staleness=9, steps=2, prompts=2)
    it.start()
    assert positions(it) == [0, 1, 2, 3]

    it = run(capacity=99, sync_max_staleness=0, prompts=2)
    it.start()
    first, second = it.leases()
    it.finish("r0", first, drop="equal_rewards")
    it.report("r0", GroupFailed(lease=second.lease, reason="too_long", detail="99 units"))
    assert positions(it) == [2, 3]
    assert it.state.ledger.dropped == {"equal_rewards": 1, "too_long": 1}
    assert it.state.status_details["too_long"] == "99 units"


def test_sync_leases_one_wave_at_a_time_split_by_name(run):
    it = run(synchronous=True, sync_max_staleness=0, prompts=5, rollout_replicas=2)
    it.start(rollouts=2)
    assert positions(it, "r0") == [0, 2, 4]
    assert positions(it, "r1") == [1, 3]

    it = run(synchronous=True, sync_max_staleness=0, prompts=3)
    it.start()
    first, second, third = it.leases()
    it.finish("r0", first, drop="equal_rewards")
    it.finish("r0", second, drop="equal_rewards")
    assert positions(it) == [2]
    it.finish("r0", third)
    assert positions(it) == [3, 4]
    assert it.state.step == 0


def test_sync_waits_for_the_step_its_weights_on_every_replica_and_an_evaluation(run):
    it = run(synchronous=True, sync_max_staleness=0, prompts=2, rollout_replicas=2)
    it.start(rollouts=2)
    for name in ("r0", "r1"):
        for lease in it.leases(name):
            it.finish(name, lease)
    assert it.state.running is not None
    assert it.leases("r0") == it.leases("r1") == []
    it.train()
    assert it.state.step == 1
    assert it.leases("r0") == it.leases("r1") == []
    it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
    assert it.leases("r0") == it.leases("r1") == []
    it.report("r1", *it.fakes["r1"]._load(it.directive("r1")))
    assert (positions(it, "r0"), positions(it, "r1")) == ([2], [3])

    it = run(synchronous=True, sync_max_staleness=0, evaluation_prompts=3)
    it.start()
    assert {lease.purpose for lease in it.leases()} == {"evaluation"}
    for lease in it.leases():
        it.finish("r0", lease)
    assert {lease.purpose for lease in it.leases()} == {"train"}


def test_what_a_lost_replica_had_is_queued_again_and_its_reports_are_in_vain(run):
    it = run(capacity=4, sync_max_staleness=9, prompts=3, rollout_replicas=2)
    it.start(rollouts=2)
    assert positions(it, "r0") == [0, 1, 2, 3]
    finished = it.leases("r0")[0]
    it.finish("r0", finished)
    kept = it.leases("r1")[0]
    it.finish("r1", kept)
    it.lose("r0")
    ledger = it.state.ledger
    assert sorted(ledger.finished) == [kept.position]
    assert ledger.samples.dropped == {"lost": 4}
    # What r1 had room for is leased to it at once, the lowest position first; the rest is queued.
    assert 0 in positions(it, "r1")
    assert finished.lease not in [lease.lease for lease in it.leases("r1")]
    assert sorted([*ledger.queued, *ledger.in_flight, kept.position]) == list(range(ledger.next_position))

    it = run(rollout_replicas=1)
    it.start()
    lease = it.leases()[0]
    it.lose("r0")
    it.join("r0")
    it.finish("r0", lease)
    assert it.state.ledger.finished == {}
    assert it.directive("r0").hold == ()


def test_payloads_are_held_until_they_are_trained_on(run):
    it = run(prompts=2)
    it.start()
    first, second = it.leases()[:2]
    it.finish("r0", first)
    assert it.directive("r0").hold == (first.lease,)
    it.finish("r0", second)
    assert it.state.running is not None
    assert it.directive("r0").hold == (first.lease, second.lease)
    it.train()
    assert it.directive("r0").hold == ()


def test_rows_follow_the_order_of_the_run(run):
    from cosmos_core.config.order import row_of

    it = run()
    it.start()
    assert [lease.row for lease in it.leases()] == [row_of(position, 11, 5, 0)[1] for position in (0, 1, 2)]
