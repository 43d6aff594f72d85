from __future__ import annotations

import copy

import attrs
import pytest

from cosmos_core.control.machine.invariants import check


@pytest.fixture
def busy(run):
    it = run(rollout_replicas=2, capacity=4, sync_max_staleness=9, evaluation_prompts=3, prompts=2, steps=9)
    it.start(rollouts=2)
    for lease in [lease for lease in it.leases("r0") if lease.purpose == "train"]:
        it.finish("r0", lease)
    return it.state


def count(state):
    state.ledger.consumed += 1


def lose(state):
    state.ledger.finished.popitem()


def double(state):
    state.ledger.queued.append(next(iter(state.ledger.finished)))


def invent(state):
    state.ledger.queued.append(state.ledger.next_position + 5)


def generate(state):
    state.ledger.samples.generated += 1


def forget_lease(state):
    state.replicas["r1"].leases.clear()


def miscount(state):
    state.replicas["r0"].num_training += 1


def release(state):
    state.replicas["r0"].held.add(999)


def unclaim(state):
    state.running = None


def reorder(state):
    state.running.order = attrs.evolve(state.running.order, shares=((0, 0),))


def age(state):
    for position, group in state.ledger.batched.items():
        samples = tuple(attrs.evolve(sample, oldest_version=-99) for sample in group.samples)
        state.ledger.batched[position] = attrs.evolve(group, samples=samples)


def evaluate(state):
    state.pending[0].queued.append(0)


def overtake(state):
    state.replicas["r0"].version = 7


SPOILERS = (
    count,
    lose,
    double,
    invent,
    generate,
    forget_lease,
    miscount,
    release,
    unclaim,
    reorder,
    age,
    evaluate,
    overtake,
)


def test_every_kind_of_damage_is_noticed(busy, subtests):
    for spoil in SPOILERS:
        with subtests.test(spoil=spoil):
            check(busy)
            state = copy.deepcopy(busy)
            spoil(state)
            with pytest.raises(AssertionError, match="at step 0"):
                check(state)
