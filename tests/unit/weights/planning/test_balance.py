import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.weights.planning.balance import TOLERANCE, shares

SETS = st.sets(st.integers(0, 6), min_size=1)
DEMANDS = st.lists(st.tuples(SETS, st.floats(0.01, 1e13)), min_size=1, max_size=12)


def loads_of(demands, parts):
    loads = np.zeros(7)
    for (members, amount), part in zip(demands, parts, strict=True):
        loads[sorted(members)] += amount * part
    return loads


def solved(demands):
    senders = [np.array(sorted(members)) for members, _ in demands]
    return shares(senders, np.array([amount for _, amount in demands]))


@given(DEMANDS)
def test_no_giver_has_more_to_send_than_another_that_could(demands):
    parts = solved(demands)
    loads = loads_of(demands, parts)
    for (members, _), part in zip(demands, parts, strict=True):
        assert part.sum() == pytest.approx(1)
        assert (part >= 0).all()
        mine = loads[sorted(members)]
        # The last round changes loads once more, after it was seen that they are even.
        assert mine[part > 1e-9].max() <= (1 + 3 * TOLERANCE) * mine.min() + 1e-9 * loads.max()


@given(DEMANDS)
def test_the_largest_load_is_the_least_possible(demands):
    forced = [
        sum(amount for members, amount in demands if members <= chosen) / len(chosen)
        for chosen in ({n for n in range(7) if bits >> n & 1} for bits in range(1, 128))
    ]
    assert loads_of(demands, solved(demands)).max() <= (1 + TOLERANCE) * max(forced)


def test_senders_of_the_same_demands_give_exactly_the_same():
    parts = shares([np.array([0, 1, 2]), np.array([2]), np.array([0, 1, 2])], np.array([90.0, 10.0, 7.0]))
    assert parts[0][0] == parts[0][1]
    assert parts[2][0] == parts[2][1]


def test_nested_demands_by_hand():
    parts = shares([np.array([0]), np.array([0, 1]), np.array([0, 1, 2])], np.array([6.0, 3.0, 9.0]))
    np.testing.assert_allclose(parts[0], [1])
    np.testing.assert_allclose(parts[1], [0, 1])
    np.testing.assert_allclose(parts[2], [0, 1 / 3, 2 / 3])


def test_a_long_chain_of_overlapping_demands_evens_out():
    number = 24
    senders = [np.array([0]), *(np.array([n, n + 1]) for n in range(number - 1))]
    amounts = np.array([24.0, *[0.0001] * (number - 1)])
    amounts[1:] = 24.0
    loads = np.zeros(number)
    for members, amount, part in zip(senders, amounts, shares(senders, amounts), strict=True):
        loads[members] += amount * part
    assert loads.max() <= 1.05 * loads.mean()
    assert math.isclose(loads.sum(), amounts.sum())


def test_a_demand_that_does_not_show_beside_the_loads_is_given_all_the_same():
    parts = shares([np.array([0]), np.array([1]), np.array([0, 1])], np.array([1e13, 1e13, 1e-6]))
    assert parts[2].sum() == pytest.approx(1)


def test_nothing_to_share():
    assert shares([], np.zeros(0)) == []
