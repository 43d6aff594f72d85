"""The divergence as part of the reward, against numbers worked by hand."""

import math

import pytest
import torch

from cosmos_algorithm_grpo import ClippedOptions, clipped
from cosmos_core.protocols import AlgorithmContext
from cosmos_core.protocols.algorithm import AdvantageEstimator, Taken

CONTEXT = AlgorithmContext(group_size=1, temperature=1.0, max_units=100, max_staleness=2)


def make(scale="none", weight=0.5, **options):
    given = {"kl_weight": weight, "kl_place": "reward", "kl_estimator": "k1", **options}
    return clipped(ClippedOptions(baseline="none", scale=scale, advantage_eps=0.0, **given), CONTEXT)


def taken(place, advantage, divergences):
    """A sequence with these log(policy / reference)."""
    reference_n = torch.full((len(divergences),), -1.0)
    return Taken(
        place=place,
        advantage=advantage,
        logprobs_n=reference_n + torch.tensor(divergences),
        frozen_n={"reference": reference_n},
    )


def estimates(algorithm, sequences):
    estimate = algorithm.settle({each.place: algorithm.summarise(each) for each in sequences})
    return [estimate(each) for each in sequences]


def test_each_decision_counts_the_divergence_from_itself_on():
    (found,) = estimates(make(), [taken(0, 1.0, [0.2, -0.4, 0.6])])
    # 1 - ½ (0.2 - 0.4 + 0.6), 1 - ½ (-0.4 + 0.6), 1 - ½ 0.6
    assert found.advantages_n.tolist() == pytest.approx([0.8, 0.9, 0.7])
    assert found.advantages_n.dtype == torch.float32
    assert found.metrics == {"reference_kl": pytest.approx(0.4 / 3)}


def test_whitening_is_over_all_decisions_of_the_batch():
    sequences = [taken(0, 1.0, [0.2, -0.4, 0.6]), taken(7, -1.0, [0.0])]
    first, second = estimates(make("batch"), sequences)
    # 0.8, 0.9, 0.7, -1: mean 0.35, squares .2025 + .3025 + .1225 + 1.8225 = 2.45, sample variance 2.45 / 3
    std = math.sqrt(2.45 / 3)
    assert first.advantages_n.tolist() == pytest.approx([0.45 / std, 0.55 / std, 0.35 / std])
    assert second.advantages_n.tolist() == pytest.approx([-1.35 / std])


def test_only_what_needs_a_reference_asks_for_it():
    none = make(weight=0.0)
    assert none.consults == {}
    assert not isinstance(none, AdvantageEstimator)
    in_loss = make(kl_place="loss", kl_estimator="k3")
    assert in_loss.consults == {"reference": None}
    assert not isinstance(in_loss, AdvantageEstimator)
    assert not in_loss.skips_zero_advantage
    in_reward = make()
    assert in_reward.consults == {"reference": None}
    assert isinstance(in_reward, AdvantageEstimator)
    assert not in_reward.skips_zero_advantage
