"""Advantages against numbers worked by hand."""

import math

import pytest

from cosmos_algorithm_grpo.advantage import Whitening, all_equal, centred, over_group_deviation, whitened


def mean_only(rewards):
    return centred(rewards, "group-mean")


def leave_one_out(rewards):
    return centred(rewards, "leave-one-out")


def normalised(rewards, eps=0.0):
    return over_group_deviation(mean_only(rewards), rewards, eps=eps)


ALL = [normalised, mean_only, leave_one_out]


def test_each_estimate_by_hand():
    # mean 0.25; squares 3 · 0.0625 + 0.5625 = 0.75; sample variance 0.75 / 3 = 0.25, std 0.5 (population: 0.433)
    assert normalised([1.0, 0.0, 0.0, 0.0]) == [1.5, -0.5, -0.5, -0.5]
    assert normalised([1.0, 0.0, 0.0, 0.0], eps=0.25) == [1.0, -1 / 3, -1 / 3, -1 / 3]
    assert mean_only([3.0, 1.0, 2.0]) == [1.0, -1.0, 0.0]
    # 4 - (1 + 1) / 2, 1 - (4 + 1) / 2 twice
    assert leave_one_out([4.0, 1.0, 1.0]) == pytest.approx([3.0, -1.5, -1.5])
    # Without the unscored one: 4 - 1, 1 - 4
    assert leave_one_out([4.0, None, 1.0]) == [pytest.approx(3.0), None, pytest.approx(-3.0)]
    assert centred([1.0, None, 1.0], "none") == [1.0, None, 1.0]


def test_an_unscored_sample_is_no_zero():
    """Counted as 0, the failed sample would pull the mean to 2/3 and the right answers would differ from 0."""
    for estimate in ALL:
        assert estimate([1.0, None, 1.0]) == [0.0, None, 0.0]
        high, low = estimate([2.0, 1.0])
        assert estimate([2.0, None, 1.0]) == [pytest.approx(high), None, pytest.approx(low)]


def test_rewards_without_contrast_teach_exactly_nothing():
    assert math.fsum([0.1] * 7) / 7 != 0.1 or sum([0.1] * 7) / 7 != 0.1
    for estimate in ALL:
        assert estimate([0.1] * 7) == [0.0] * 7
        assert estimate([5.0, None]) == [0.0, None]
        assert estimate([None, None]) == [None, None]
    for batch in ([[0.1] * 7, [0.1]], [[3.0]], [[]], [[None]]):
        found = whitened(batch, [[3] * len(group) for group in batch], eps=0.0)
        assert found == [[None if value is None else 0.0 for value in group] for group in batch]


def test_all_equal_looks_at_scored_samples_only():
    assert all_equal([1.0, None, 1.0])
    assert not all_equal([1.0, None, 0.0])


def test_whitening_counts_each_decision_of_all_groups():
    # Decisions 2, 2, 2, -1, 0, 1: mean 1, squares 1 + 1 + 1 + 4 + 1 + 0 = 8, sample variance 8 / 5
    std = math.sqrt(8 / 5)
    found = whitened([[2.0, None, -1.0], [0.0, 1.0]], [[3, 9, 1], [1, 1]], eps=0.0)
    assert found == [[pytest.approx(1 / std), None, pytest.approx(-2 / std)], [pytest.approx(-1 / std), 0.0]]
    assert whitened([[2.0, -1.0], [0.0, 1.0]], [[3, 1], [1, 1]], eps=1.0)[0][0] == pytest.approx(1 / (std + 1.0))


def test_whitening_adds_up_over_parts():
    sums = [(2.0, 3.0, 5.0), (1.0, -1.0, 1.0), (3.0, 0.5, 2.0)]
    one, other = Whitening(sums, eps=0.0), Whitening(sums[::-1], eps=0.0)
    assert (one.mean, one.factor) == (other.mean, other.factor)
