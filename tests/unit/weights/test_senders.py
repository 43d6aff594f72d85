import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.weights.senders import shares

SETS = st.sets(st.integers(0, 6), min_size=1)
DEMANDS = st.lists(st.tuples(SETS, st.floats(0.01, 1e13)), min_size=1, max_size=12)


def loads_of(senders, amounts, parts):
    loads = np.zeros(1 + max(int(members.max()) for members in senders))
    for members, amount, part in zip(senders, amounts, parts, strict=True):
        loads[members] += amount * part
    return loads


@given(DEMANDS)
def test_every_demand_is_given_once_and_loads_are_within_a_tenth_of_the_mean_of_the_best(demands):
    senders = [np.array(sorted(members)) for members, _ in demands]
    amounts = np.array([amount for _, amount in demands])
    parts = shares(senders, amounts)
    for part in parts:
        assert part.sum() == pytest.approx(1)
        assert (part >= 0).all()
    loads = loads_of(senders, amounts, parts)
    best = max(
        sum(amount for members, amount in demands if members <= chosen) / len(chosen)
        for chosen in ({n for n in range(7) if bits >> n & 1} for bits in range(1, 128))
    )
    assert loads.max() <= best + 0.1 * amounts.sum() / len({n for members, _ in demands for n in members})


def test_nested_demands_by_hand():
    parts = shares([np.array([0, 1, 2]), np.array([0, 1]), np.array([0])], np.array([9.0, 3.0, 6.0]))
    np.testing.assert_allclose(parts[0], [0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(parts[1], [0, 1])
    np.testing.assert_allclose(parts[2], [1])
    parts = shares([np.array([0, 1, 2]), np.array([2]), np.array([0, 1, 2])], np.array([90.0, 10.0, 7.0]))
    np.testing.assert_allclose([part[0] for part in parts[::2]], [part[1] for part in parts[::2]])


def test_a_chain_of_overlapping_demands_evens_out():
    number = 24
    senders = [np.array([0]), *(np.array([n, n + 1]) for n in range(number - 1))]
    amounts = np.full(number, 24.0)
    loads = loads_of(senders, amounts, shares(senders, amounts))
    assert loads.max() <= 1.05 * loads.mean()
    assert math.isclose(loads.sum(), amounts.sum())


def test_a_demand_that_does_not_show_beside_the_loads_is_given_all_the_same():
    parts = shares([np.array([0]), np.array([1]), np.array([0, 1])], np.array([1e13, 1e13, 1e-6]))
    assert parts[2].sum() == pytest.approx(1)
    assert shares([], np.zeros(0)) == []
