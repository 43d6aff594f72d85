"""Rewards relative to those of the same prompt, against numbers worked by hand."""

import math

import pytest

from cosmos_core.protocols import PlainAlgorithm
from cosmos_core.protocols.objectives import limited, refuse_nonfinite, relative_rewards
from cosmos_core.types import Group, Sample, SampleStatus


def group(*rewards):
    return Group(
        position=0,
        samples=tuple(
            Sample(
                index=index,
                status=SampleStatus.REWARD_FAILED if reward is None else SampleStatus.OK,
                reward=reward,
                rewards={},
                oldest_version=0,
                newest_version=0,
                num_units=4,
                num_prompt_units=0,
            )
            for index, reward in enumerate(rewards)
        ),
    )


def test_the_deviation_is_the_sample_one_of_the_group_or_of_the_batch():
    # Mean 2, squares 1 + 0 + 1 over n - 1 = 2: deviation 1, where the population's is 0.816.
    assert relative_rewards([group(1.0, 2.0, 3.0)], eps=1e-4) == [
        [pytest.approx(-1.0 / 1.0001), 0.0, pytest.approx(1.0 / 1.0001)]
    ]

    # Rewards 0, 2, 4, 6: mean 3, squares 9 + 1 + 1 + 9 over 3. Each group's mean is taken off all the same.
    divisor = math.sqrt(20.0 / 3.0) + 0.5
    found = relative_rewards([group(0.0, 2.0), group(4.0, 6.0)], eps=0.5, spread="batch")
    assert found == [[pytest.approx(-1.0 / divisor), pytest.approx(1.0 / divisor)]] * 2


def test_an_unscored_sample_is_no_zero():
    assert relative_rewards([group(1.0, None, 2.0, 3.0)], eps=0.0) == [[-1.0, None, 0.0, 1.0]]
    found = relative_rewards([group(0.0, 2.0, None), group(None, 4.0, 6.0)], eps=0.0, spread="batch")
    expected = 1.0 / math.sqrt(20.0 / 3.0)
    assert found == [
        [pytest.approx(-expected), pytest.approx(expected), None],
        [None, pytest.approx(-expected), pytest.approx(expected)],
    ]


def test_equal_rewards_are_exactly_zero():
    # 0.1 + 0.1 + 0.1 is not 0.3: what rounding leaves would count 1e-17 / eps.
    assert relative_rewards([group(0.1, 0.1, 0.1)], eps=1e-12) == [[0.0, 0.0, 0.0]]
    assert relative_rewards([group(0.1, 0.1), group(0.2, 0.3)], eps=0.0, spread="batch")[0] == [0.0, 0.0]
    assert relative_rewards([group(5.0, None)], eps=0.0) == [[0.0, None]]
    assert relative_rewards([group(None, None)], eps=0.0) == [[None, None]]


def test_limited_advantages_lie_within_the_limit():
    assert limited([[-3.0, None, 0.5], [2.0]], 1.5) == [[-1.5, None, 0.5], [1.5]]


def test_a_group_with_a_reward_that_is_no_number_is_dropped_with_a_reason(subtests):
    for reward in [math.nan, math.inf, -math.inf]:
        with subtests.test(reward=reward):
            assert refuse_nonfinite(group(1.0, reward)) == PlainAlgorithm().admit(group(reward)) == "reward not finite"
    for kept in (group(1.0, None, -2.0), group(1.0)):
        assert refuse_nonfinite(kept) is PlainAlgorithm().admit(kept) is None
