import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_core.config.order import evaluation_seed, group_seed, row_of, window_problem
from cosmos_core.protocols.dataset import Window

# A resumed run must draw what it drew before, also with a newer release.
GOLDEN_ROWS = [9, 3, 6, 2, 4, 8, 7, 5, 0, 1]
GOLDEN_SEEDS = [135851042560207719, 6259405198084569922]
GOLDEN_EVALUATION_SEEDS = [5408158416292570805, 1501594459284426756]


@settings(max_examples=80)
@given(
    num_rows=st.integers(1, 700),
    seed=st.integers(0, 2**70),
    stage=st.integers(0, 3),
    epoch=st.integers(0, 1000),
)
def test_each_epoch_visits_every_row_once(num_rows, seed, stage, epoch):
    first = epoch * num_rows
    drawn = [row_of(position, num_rows, seed, stage) for position in range(first, first + num_rows)]
    assert {each for each, _ in drawn} == {epoch}
    assert sorted(row for _, row in drawn) == list(range(num_rows))


@given(position=st.integers(0, 2**60), num_rows=st.integers(1, 2**40))
def test_rows_of_huge_datasets_are_in_range(position, num_rows):
    epoch, row = row_of(position, num_rows, 7, 0)
    assert epoch == position // num_rows
    assert 0 <= row < num_rows


def test_epochs_stages_and_seeds_have_orders_of_their_own():
    def order(seed, stage, epoch):
        return tuple(row_of(epoch * 100 + place, 100, seed, stage)[1] for place in range(100))

    orders = {order(seed, stage, epoch) for seed in range(3) for stage in range(2) for epoch in range(3)}
    assert len(orders) == 18
    assert tuple(range(100)) not in orders


def test_the_order_is_fixed_for_ever():
    assert [row_of(position, 10, 0, 1)[1] for position in range(10)] == GOLDEN_ROWS
    assert [group_seed(0, 1, position) for position in range(2)] == GOLDEN_SEEDS
    assert [evaluation_seed(0, row) for row in range(2)] == GOLDEN_EVALUATION_SEEDS


def test_every_row_is_as_often_first(subtests):
    for num_rows in [2, 3, 5, 17]:
        with subtests.test(num_rows=num_rows):
            draws = 3000
            counts = Counter(row_of(0, num_rows, seed, 0)[1] for seed in range(draws))
            expected = draws / num_rows
            chi_square = sum((counts[row] - expected) ** 2 / expected for row in range(num_rows))
            # Beyond 4 standard deviations of a chi-square of num_rows - 1 degrees of freedom.
            assert chi_square < (num_rows - 1) + 4 * (2 * (num_rows - 1)) ** 0.5


def test_neighbours_are_spread():
    rows = [row_of(position, 1000, 3, 0)[1] for position in range(1000)]
    gaps = [abs(one - other) for one, other in itertools.pairwise(rows)]
    assert 300 < sum(gaps) / len(gaps) < 370  # a random permutation of 1,000: 333.7


def test_positions_that_do_not_exist(subtests):
    for position, num_rows in [(-1, 5), (0, 0)]:
        with subtests.test(position=position), pytest.raises(ValueError, match="does not exist"):
            row_of(position, num_rows, 0, 0)


def test_group_seeds_differ_and_fit_63_bits():
    seeds = [group_seed(seed, stage, place) for seed in range(4) for stage in range(2) for place in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_evaluation_seeds_differ_by_run_and_row():
    seeds = [evaluation_seed(seed, row) for seed in range(4) for row in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


WINDOWS = (Window(num_prompts=25, num_rows=10), Window(num_prompts=3, num_rows=40))


def test_a_window_goes_through_its_rows_and_then_all_rows_come():
    def drawn(first, last):
        return [row_of(position, 100, 7, 0, WINDOWS)[1] for position in range(first, last)]

    assert sorted(drawn(0, 10)) == sorted(drawn(10, 20)) == list(range(10))
    assert drawn(0, 10) != drawn(10, 20)
    assert all(row < 10 for row in drawn(20, 25))
    assert all(row < 40 for row in drawn(25, 28))
    assert sorted(drawn(28, 128)) == list(range(100))
    # After the windows it is the order of a run that has none.
    assert drawn(28, 128) == [row_of(position, 100, 7, 0)[1] for position in range(100)]


def test_windows_of_one_size_have_orders_of_their_own():
    same = (Window(num_prompts=10, num_rows=10), Window(num_prompts=10, num_rows=10))
    rows = [row_of(position, 10, 7, 0, same)[1] for position in range(30)]
    assert len({tuple(rows[first : first + 10]) for first in (0, 10, 20)}) == 3


def test_windows_that_no_run_can_keep(subtests):
    for windows in [
        [],
        ((5, 5),),
        (Window(num_prompts=0, num_rows=5),),
        (Window(num_prompts=1, num_rows=0),),
        (Window(num_prompts=1, num_rows=11),),
    ]:
        with subtests.test(windows=windows):
            assert window_problem(windows, 10)


def test_windows_that_a_run_can_keep():
    assert not window_problem((), 10)
    assert not window_problem((Window(num_prompts=1, num_rows=10),), 10)
