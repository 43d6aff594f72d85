"""Advantages against numbers worked by hand."""

import math

import pytest

from cosmos_algorithm_grpo.advantage import all_equal, mean_only, normalised


def test_normalised_divides_by_the_sample_standard_deviation():
    # mean 0.25; squares 3 · 0.0625 + 0.5625 = 0.75; sample variance 0.75 / 3 = 0.25, std 0.5 (population: 0.433)
    assert normalised([1.0, 0.0, 0.0, 0.0], eps=0.0) == [1.5, -0.5, -0.5, -0.5]


def test_eps_is_added_to_the_standard_deviation():
    assert normalised([1.0, 0.0, 0.0, 0.0], eps=0.25) == [1.0, -1 / 3, -1 / 3, -1 / 3]


def test_mean_only_has_no_divisor():
    assert mean_only([3.0, 1.0, 2.0]) == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("estimate", [lambda rewards: normalised(rewards, eps=0.0), mean_only])
def test_an_unscored_sample_is_no_zero(estimate):
    """Counted as 0, the failed sample would pull the mean to 2/3 and the right answers would differ from 0."""
    assert estimate([1.0, None, 1.0]) == [0.0, None, 0.0]
    assert estimate([2.0, None, 1.0]) == [pytest.approx(v) if v else v for v in estimate_pair(estimate)]


def estimate_pair(estimate):
    high, low = estimate([2.0, 1.0])
    return [high, None, low]


@pytest.mark.parametrize("estimate", [lambda rewards: normalised(rewards, eps=0.0), mean_only])
def test_equal_rewards_give_exactly_zero_despite_rounding(estimate):
    assert math.fsum([0.1] * 7) / 7 != 0.1 or sum([0.1] * 7) / 7 != 0.1
    assert estimate([0.1] * 7) == [0.0] * 7


@pytest.mark.parametrize("estimate", [lambda rewards: normalised(rewards, eps=0.0), mean_only])
def test_one_scored_sample_or_none_teaches_nothing(estimate):
    assert estimate([5.0, None]) == [0.0, None]
    assert estimate([None, None]) == [None, None]


def test_all_equal_looks_at_scored_samples_only():
    assert all_equal([1.0, None, 1.0])
    assert not all_equal([1.0, None, 0.0])
