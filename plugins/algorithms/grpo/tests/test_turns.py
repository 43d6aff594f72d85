"""Advantages of turns, against numbers worked by hand."""

import math

import pytest
import torch

from cosmos_algorithm_grpo import ClippedOptions, clipped
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext
from cosmos_core.protocols.algorithm import Taken, TurnTaken

CONTEXT = AlgorithmContext(group_size=2, temperature=1.0, max_units=100, max_staleness=2)


def advantages(*samples, places=range(9), **options):
    """Those of samples, each its reward and turns of (decisions, reward)."""
    algorithm = clipped(ClippedOptions(**{"credit": "turn", "scale": "none", "advantage_eps": 0.0, **options}), CONTEXT)
    sequences = [
        Taken(
            place=place,
            advantage=reward,
            logprobs_n=torch.zeros(max(sum(size for size, _ in turns), 1)),
            turns=tuple(TurnTaken(num_decisions=size, reward=own) for size, own in turns),
        )
        for place, (reward, turns) in zip(places, samples, strict=False)
    ]
    estimate = algorithm.settle({each.place: algorithm.summarise(each) for each in sequences})
    return [estimate(each).advantages_n.tolist() for each in sequences]


def test_a_turn_counts_what_is_rewarded_from_it_on_against_the_same_turn_of_others():
    # Returns 1 + ½ (0 + ½ · 2) and so on: the 2 is what the rewards of turns leave of 3.
    found = advantages((3.0, ((1, 1.0), (2, 0.0), (1, 0.0))), (0.0, ((1, 0.0), (1, 0.0))), turn_discount=0.5)
    assert found == [[0.75, 0.5, 0.5, 1.0], [-0.75, -0.5]]
    assert advantages((1.0, ((1, 1.0), (1, 0.0))), (0.0, ()))[0] == [0.5, 0.0]


def test_one_reward_at_the_end_is_a_samples_ordinary_advantage():
    samples = ((1.0, ((2, 0.0), (1, 0.0))), (0.0, ()), (5.0, ()), (5.0, ((1, 5.0),)))
    assert advantages(*samples) == [[0.5] * 3, [-0.5], [0.0], [0.0]]
    (first, *_) = advantages(*samples, scale="group-std")
    assert first == pytest.approx([math.sqrt(0.5)] * 3)
    # Of a group of which one sample is left there is nothing to compare.
    assert advantages(samples[0], samples[2], places=(1, 2)) == [[0.0] * 3, [0.0]]


def test_whitening_is_over_all_decisions_of_the_batch():
    ours, theirs = advantages((1.0, ((2, 0.0), (1, 0.0))), (0.0, ()), scale="batch")
    # ½, ½, ½ and -½: mean ¼, squares 3 (¼)² + (¾)² = ¾, sample variance ¾ / 3.
    assert [*ours, *theirs] == pytest.approx([0.5, 0.5, 0.5, -1.5])


def test_a_sample_whose_turns_differ_goes_through_the_model_whatever_their_sum():
    assert not clipped(ClippedOptions(credit="turn"), CONTEXT).skips_zero_advantage
    with pytest.raises(ConfigError, match=r"turn_discount = 0\.9: credit = 'sample' counts"):
        clipped(ClippedOptions(turn_discount=0.9), CONTEXT)
    divergence = {"kl_weight": 0.1, "kl_place": "reward", "kl_estimator": "k1"}
    with pytest.raises(ConfigError, match="credit = 'turn': with kl_place = 'reward'"):
        clipped(ClippedOptions(credit="turn", scale="none", **divergence), CONTEXT)
