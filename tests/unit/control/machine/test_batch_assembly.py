from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as some

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.control.machine.batch_assembly import LEAST_USELESS, MAX_ATTEMPTS, balanced
from cosmos_core.control.machine.events import Commanded, RegroupDue
from cosmos_core.control.machine.records import MOST_REASONS, OTHER_REASONS
from cosmos_core.transport.messages import REQUEST, Set
from cosmos_core.transport.reports import GroupFailed, StepDone, StepFailed


def fail(it, name="p0", missing=(), reason="a peer left"):
    order, generation = it.directive(name).train, it.state.generation_number
    it.report(
        name,
        StepFailed(step=order.step, attempt=order.attempt, generation=generation, missing=missing, reason=reason),
    )


def test_the_batch_is_the_first_finished_groups_by_position_without_details(run, make_sample):
    it = run(capacity=9, sync_max_staleness=9, prompts=2, steps=9)
    it.start()
    leases = it.leases()
    it.finish("r0", leases[5])
    it.finish("r0", leases[3])
    order = it.directive("p0").train
    assert [group.position for group in order.groups] == [3, 5]
    assert [group.lease for group in order.groups] == [leases[3].lease, leases[5].lease]
    assert (order.step, order.attempt, order.stage, order.publish) == (1, 1, 0, True)

    it = run(prompts=1, steps=1)
    it.start()
    it.finish("r0", it.leases()[0], *(attrs.evolve(make_sample(index), detail="why") for index in range(4)))
    (group,) = it.directive("p0").train.groups
    assert {sample.detail for sample in group.samples} == {""}


def test_a_group_with_too_few_scored_samples_is_dropped(run, make_sample):
    it = run()
    it.start()
    samples = [make_sample(0), *(make_sample(index, status="reward_failed") for index in (1, 2, 3))]
    it.finish("r0", it.leases()[0], *samples)
    it.finish("r0", it.leases()[0], make_sample(0), make_sample(1), make_sample(2, status="reward_timeout"))
    assert it.state.ledger.dropped == {"unscored": 1}
    assert it.state.ledger.samples.dropped == {"unscored": 4}
    assert len(it.state.ledger.finished) == 1


def test_staleness_is_bounded_by_the_oldest_token_when_the_sample_is_trained(run, make_sample, subtests):
    for oldest, is_dropped in [(0, True), (1, False), (2, False)]:
        with subtests.test(oldest=oldest):
            it = run(capacity=9, sync_max_staleness=1, prompts=1, steps=9, waits_for_oldest=False)
            it.start()
            old = it.leases()[0]
            for step in (1, 2):
                it.finish("r0", next(lease for lease in it.leases() if lease.lease != old.lease))
                it.train()
                assert it.state.step == step
                it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
            # Step 3 trains version 2: one sample of the group began at `oldest`.
            samples = [make_sample(index, version=2, newest=2) for index in range(3)]
            it.finish("r0", old, *samples, make_sample(3, version=oldest, newest=2))
            assert it.state.ledger.dropped == ({"stale": 1} if is_dropped else {})
            assert (it.state.running is None) == is_dropped


def test_a_finished_group_that_grows_stale_while_it_waits_is_dropped(run, make_sample):
    it = run(capacity=9, sync_max_staleness=1, prompts=1, steps=9, waits_for_oldest=False)
    it.start()
    first, old = it.leases()
    it.finish("r0", first)
    it.train()
    it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
    it.finish("r0", it.leases()[1])
    assert it.state.running is not None
    it.finish("r0", old, *(make_sample(index, version=0, newest=1) for index in range(4)))
    assert it.directive("r0").hold != ()
    assert it.state.ledger.dropped == {}
    it.train()
    assert it.state.step == 2
    assert it.state.ledger.dropped == {"stale": 1}
    assert old.lease not in it.directive("r0").hold


def test_a_step_takes_what_will_be_stale_first(run, make_sample):
    it = run(capacity=9, sync_max_staleness=3, prompts=1, steps=9)
    it.start()
    first, second, third, fourth = it.leases()
    it.finish("r0", fourth)
    assert [group.position for group in it.state.running.order.groups] == [3]
    it.finish(
        "r0", first, make_sample(version=2, newest=2), *(make_sample(n, version=2, newest=2) for n in range(1, 4))
    )
    it.finish("r0", third, *(make_sample(n, version=1, newest=2) for n in range(4)))
    it.finish("r0", second, *(make_sample(n, version=1, newest=2) for n in range(4)))
    taken = []
    for _ in range(3):
        it.train()
        taken.append(it.state.running.order.groups[0].position)
    assert taken == [1, 2, 0]


def test_a_step_leaves_room_for_those_in_flight_that_would_be_stale(run, make_sample):
    pace = (("sync.max_staleness", 2), ("sync.interval", 1))
    dynamic = tuple(DynamicKey(key=key, type="integer", value=value, at_least=0.0) for key, value in pace)

    def slow_at_first(**changes):
        it = run(capacity=9, sync_max_staleness=2, prompts=2, steps=9, **changes)
        it.start()

        def finish(*positions):
            for lease in [lease for lease in it.leases() if lease.position in positions]:
                began = it.state.ledger.in_flight[lease.position]
                it.finish("r0", lease, *(make_sample(n, version=began, newest=it.state.step) for n in range(4)))
            return [group.position for group in it.state.running.order.groups] if it.state.running else []

        def train():
            it.train()
            it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))

        assert finish(3, 4) == [3, 4]
        train()
        assert [lease.position for lease in it.leases()] == [0, 1, 2, 5, 6, 7]
        return it, finish, train

    # Of the six of version 0 that steps 1 to 3 train four are left, which are all the places of steps 2 and 3.
    it, finish, train = slow_at_first()
    assert finish(6, 7) == finish(5) == []
    assert finish(2) == [2, 5]
    train()
    assert finish(8, 9) == finish(1) == []
    assert finish(0) == [0, 1]
    train()
    # The places of step 4 are enough for those of version 1, and none of them is in flight.
    assert (it.state.running.order.step, it.state.ledger.dropped) == (4, {})

    # A lower bound makes what is in flight too old: nothing waits for that.
    it, finish, train = slow_at_first(dynamic=dynamic)
    assert finish(6, 7) == []
    it.apply(Commanded(ident="set", request=REQUEST.encode(Set(overrides=("sync.max_staleness=0",)))))
    assert [group.position for group in it.state.running.order.groups] == [6, 7]

    # Runs of earlier releases do not wait, and their journals are read as they were written.
    it, finish, train = slow_at_first(waits_for_oldest=False)
    assert finish(6, 7) == [6, 7]
    train()
    assert finish(0, 1, 2) == [0, 1]
    train()
    assert it.state.ledger.dropped == {"stale": 1}


def test_after_a_stale_prompt_fewer_are_given_out_until_none_is_for_some_steps(run, make_sample):
    it = run(capacity=9, sync_max_staleness=2, prompts=1, steps=99, waits_for_oldest=False)
    it.start()

    def go_on(step, version):
        lease = it.leases()[-1]
        it.finish("r0", lease, *(make_sample(n, version=version, newest=version) for n in range(4)))
        it.train()
        it.report("r0", *it.fakes["r0"]._load(it.directive("r0")))
        assert it.state.step == step

    late = it.leases()[0]
    for step in range(1, 4):
        go_on(step, step - 1)
    assert len(it.leases()) == 3
    it.finish("r0", late, *(make_sample(n, version=0, newest=2) for n in range(4)))
    assert it.state.ledger.dropped == {"stale": 1}
    assert (it.state.held_back, len(it.leases())) == (1, 2)

    # However many are stale, the next step's are given out, and all again some steps later.
    for lease in it.leases():
        it.finish("r0", lease, *(make_sample(n, version=0, newest=2) for n in range(4)))
    assert it.state.ledger.dropped["stale"] >= 3
    assert (it.state.held_back, len(it.leases())) == (2, 1)
    for step in range(4, 20):
        go_on(step, step - 1)
    assert (it.state.held_back, len(it.leases())) == (0, 3)


def test_missing_payloads_queue_their_prompts_and_the_step_is_formed_again(run):
    it = run(capacity=9, sync_max_staleness=0, prompts=3)
    it.start()
    leases = it.leases()
    for lease in leases:
        it.finish("r0", lease)
    fail(it, missing=(leases[1].lease,), reason="payloads are gone")
    ledger = it.state.ledger
    assert sorted(ledger.finished) == [0, 2]
    assert it.directive("p0").train is None
    (again,) = it.leases()
    assert again.position == 1
    assert again.lease > leases[2].lease
    assert it.directive("r0").hold == (leases[0].lease, leases[2].lease)
    it.finish("r0", again)
    order = it.directive("p0").train
    assert (order.attempt, [group.position for group in order.groups]) == (2, [0, 1, 2])
    assert it.state.generation_number == 1

    it = run(policy_replicas=2, capacity=9, sync_max_staleness=0, prompts=3)
    it.start(policies=2)
    leases = it.leases()
    for lease in leases:
        it.finish("r0", lease)
    order = it.directive("p0").train
    for name, missing in (("p0", leases[0].lease), ("p1", leases[1].lease)):
        it.report(
            name,
            StepFailed(step=1, attempt=order.attempt, generation=1, missing=(missing,), reason="payloads are gone"),
        )
    assert [lease.position for lease in it.leases()] == [0, 1]


def test_payloads_of_a_lost_holder_are_missing_though_the_step_misses_others(run):
    it = run(rollout_replicas=2, prompts=2)
    it.start(rollouts=2)
    (first, *_), (second, *_) = it.leases("r0"), it.leases("r1")
    it.finish("r0", first)
    it.finish("r1", second)
    assert [group.lease for group in it.directive("p0").train.groups] == [first.lease, second.lease]
    it.lose("r1")
    fail(it, missing=(first.lease,), reason="payloads are gone")
    ledger = it.state.ledger
    assert not ledger.finished
    assert {first.position, second.position} <= {*ledger.queued, *ledger.in_flight}


def test_a_step_that_fails_is_repeated_by_a_new_generation_and_not_for_ever(run):
    it = run(prompts=2)
    it.start()
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    fail(it)
    assert it.directive("p0").train is None
    assert it.state.generation is None
    it.apply(RegroupDue())
    it.follow("p0")
    order = it.directive("p0").train
    assert (order.attempt, it.state.generation_number) == (2, 2)
    it.train()
    assert it.state.steps[0].attempt == 2

    it = run(prompts=2)
    it.start()
    for lease in it.leases()[:2]:
        it.finish("r0", lease)
    for _ in range(MAX_ATTEMPTS):
        fail(it, reason="out of memory")
        if not it.state.outcome:
            it.apply(RegroupDue())
            it.fakes["p0"]._tried.clear()
            it.report("p0", *it.fakes["p0"]._form(it.directive("p0").generation))
    assert it.state.outcome == "failed"
    assert "out of memory" in it.state.reason


def test_demonstrations_are_read_in_order_and_the_unusable_ones_dropped(run):
    it = run(warmup=2)
    it.join("p0")
    it.follow("p0")
    order = it.directive("p0").train
    assert [(group.position, group.lease, group.endpoint, group.samples) for group in order.groups] == [
        (position, -1, "", ()) for position in (0, 1, 2)
    ]
    done = StepDone(
        step=1,
        attempt=1,
        generation=1,
        skipped=True,
        metrics={"loss": 2.0},
        dropped=((1, "too_long"), (7, "?")),
        details={"too_long": "train row 1: 9 units are more than the 8 that fit"},
    )
    it.report("p0", done)
    assert it.state.status_details == {"too_long": "train row 1: 9 units are more than the 8 that fit"}
    ledger = it.state.ledgers[0]
    assert (ledger.consumed, ledger.dropped) == (2, {"too_long": 1})
    assert it.state.steps[0].skipped
    assert it.state.steps[0].num_groups == 2
    assert [group.position for group in it.directive("p0").train.groups] == [3, 4, 5]


def test_shares_are_balanced_by_units():
    assert balanced([9, 1, 1, 1, 8, 2], 2) == ((0, 1, 2), (3, 4, 5))
    assert balanced([1, 1, 1, 1, 1], 2) == ((0, 2, 4), (1, 3))
    assert balanced([0, 0, 0], 3) == ((0,), (1,), (2,))
    assert balanced([5], 2) == ((0,), ())


@given(weights=some.lists(some.integers(0, 1000), max_size=40), num_shares=some.integers(1, 5))
def test_shares_part_the_batch_and_stay_within_one_group_of_each_other(weights, num_shares):
    shares = balanced(weights, num_shares)
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    sums = [sum(weights[index] for index in share) for share in shares]
    assert max(sums) - min(sums) <= max(weights, default=0)
    assert all(list(share) == sorted(share) for share in shares)


def test_a_run_whose_every_prompt_is_useless_fails_with_the_reason(run):
    it = run(capacity=9, sync_max_staleness=9, prompts=2, steps=9)
    it.start()
    for _ in range(LEAST_USELESS):
        assert not it.state.outcome
        lease = it.leases()[0].lease
        it.report("r0", GroupFailed(lease=lease, reason="prompt_too_long", detail="a prompt of 99"))
    assert it.state.outcome == "failed"
    assert "64 prompts in a row were dropped, the last as 'prompt_too_long'" in it.state.reason
    assert "a prompt of 99" in it.state.reason

    it = run(capacity=9, sync_max_staleness=9, prompts=2, steps=9)
    it.start()
    for count in range(LEAST_USELESS):
        reason = f"{count} frames lack"
        it.report("r0", GroupFailed(lease=it.leases()[0].lease, reason=reason, detail=f"video {count}"))
    details = it.state.status_details
    assert len(details) == MOST_REASONS + 1
    assert (details["0 frames lack"], details[OTHER_REASONS]) == ("video 0", f"video {LEAST_USELESS - 1}")
    assert f"the last as '{LEAST_USELESS - 1} frames lack'" in it.state.reason

    it = run(capacity=9, sync_max_staleness=9, prompts=2, steps=9)
    it.start()
    for count in range(LEAST_USELESS + 9):
        if count == LEAST_USELESS - 1:
            it.finish("r0", it.leases()[0])
        it.report("r0", GroupFailed(lease=it.leases()[0].lease, reason="bad_row", detail="line 3"))
    assert not it.state.outcome
