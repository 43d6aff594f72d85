"""What the corrections do to prices and gradients, against numbers worked by hand."""

import math

import attrs
import pytest
import torch

from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions

CONTEXT = AlgorithmContext(group_size=4, temperature=1.0, max_units=100, max_staleness=8)
AVERAGED = attrs.evolve(CONTEXT, max_staleness=0, generates_average=True)
PRESETS = ("aipo", "decoupled-ppo", "tis", "icepop", "sequence-masking")


@pytest.fixture(scope="module")
def make():
    plugins = PluginSet.load([("algorithm", name) for name in PRESETS])
    return lambda name, context=CONTEXT, **options: plugins.create("algorithm", name, options, context)


def decisions(logprobs, *, behaviour, advantages):
    """One sequence; its old log-probs are the current ones, as at the start of a step."""
    logprobs_N = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float64),
        old_logprobs_N=logprobs_N.detach(),
        entropy_N=None,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.zeros(len(logprobs), dtype=torch.int64),
        num_sequences=1,
    )


def gradient(algorithm, given):
    priced = algorithm.loss(given)
    priced.loss_N.sum().backward()
    return given.logprobs_N.grad.tolist(), priced.metrics


# Ratios of the current policy to the one that generated: 10, 3, 1, 1/4.
BEHAVIOUR = [-1.0 - math.log(10.0), -1.0 - math.log(3.0), -1.0, -1.0 + math.log(4.0)]


def test_the_weight_scales_the_gradient_and_never_stops_it(make):
    for name, weights in (
        ("decoupled-ppo", [5.0, 3.0, 1.0, 0.25]),
        ("tis", [2.0, 2.0, 1.0, 0.25]),
        ("icepop", [0.0, 3.0, 1.0, 0.0]),
    ):
        for sign in (1.0, -1.0):
            found, metrics = gradient(make(name), decisions([-1.0] * 4, behaviour=BEHAVIOUR, advantages=[sign] * 4))
            assert found == pytest.approx([-sign * weight for weight in weights]), name
            assert metrics["importance_weight"].tolist() == pytest.approx(weights), name


def test_the_weight_is_of_the_steps_start_and_the_clip_against_it(make):
    """After an update: ratios to the start of 2 and 1/2, of the start to the behaviour policy as above."""
    start_N = torch.full((4,), -1.0, dtype=torch.float64)
    ratio_N = torch.tensor([2.0, 0.5, 2.0, 0.5], dtype=torch.float64)
    for name, weights in (
        ("decoupled-ppo", [5.0, 3.0, 1.0, 0.25]),
        ("tis", [2.0, 2.0, 1.0, 0.25]),
        ("icepop", [0.0, 3.0, 1.0, 0.0]),
    ):
        for sign, clipped in ((1.0, [1.2, 0.5, 1.2, 0.5]), (-1.0, [2.0, 0.8, 2.0, 0.8])):
            given = decisions((start_N + ratio_N.log()).tolist(), behaviour=BEHAVIOUR, advantages=[sign] * 4)
            priced = make(name).loss(attrs.evolve(given, old_logprobs_N=start_N))
            expected = [-sign * weight * ratio for weight, ratio in zip(weights, clipped, strict=True)]
            assert priced.loss_N.tolist() == pytest.approx(expected), name


def test_aipo_takes_the_behaviour_policy_as_old_log_probs(make):
    algorithm = make("aipo")
    assert algorithm.old_logprobs == "behaviour"
    given = decisions([-1.0] * 4, behaviour=BEHAVIOUR, advantages=[1.0] * 4)
    given = attrs.evolve(given, old_logprobs_N=given.behaviour_logprobs_N)
    found, metrics = gradient(algorithm, given)
    assert found == pytest.approx([-4.0, -3.0, -1.0, -0.25])
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_bad_sequence_that_is_far_off_policy_does_not_count(make):
    algorithm = make("sequence-masking", sequence_limit=0.5)
    far, near = [-0.2, -0.2], [-0.8, -0.6]
    for behaviour, advantage, masked in ((far, -1.0, 1.0), (far, 1.0, 0.0), (near, -1.0, 0.0)):
        found, metrics = gradient(algorithm, decisions([-1.0, -1.0], behaviour=behaviour, advantages=[advantage] * 2))
        assert metrics["sequence_masked_tokens"].tolist() == [masked, masked]
        assert (found == [0.0, 0.0]) is (masked == 1.0)


def test_all_average_over_tokens(make):
    assert {make(name).aggregation for name in PRESETS} == {Aggregation.TOKEN_MEAN}


def test_a_correction_combines_with_every_part(make):
    for policy in (
        {"baseline": "leave-one-out", "scale": "none"},
        {"baseline": "none", "scale": "batch"},
        {"ratio": "sequence"},
        {"aggregation": "sequence-mean-token-sum", "constant_length": 7},
        {"dynamic_sampling": True},
        {"kl_weight": 0.1},
    ):
        for name in PRESETS:
            make(name, **policy)


def test_samples_that_nothing_would_correct_are_refused(make):
    for name in PRESETS:
        make(name, context=AVERAGED)
    with pytest.raises(ConfigError, match=r"samples of the average of the weights .* would go uncorrected"):
        make("decoupled-ppo", context=AVERAGED, importance_cap=None)
    with pytest.raises(ConfigError, match="samples up to 8 steps old would go uncorrected"):
        make("tis", importance_cap=None)
    with pytest.raises(ConfigError, match="needs old_logprobs = 'recompute'"):
        make("tis", old_logprobs="behaviour")
