"""Ratios to the weights that generated, and the divergence from a reference, against numbers worked by hand."""

import math

import attrs
import pytest
import torch

from cosmos_core.protocols import AlgorithmContext, Decisions, Loss
from cosmos_core.protocols.frozen import FrozenOutput
from cosmos_core.protocols.objectives import add_divergence, clipped_surrogate, log_ratio, refuse_recomputed

IN_STEP = AlgorithmContext(group_size=4, temperature=1.0, max_units=8, max_staleness=0)


def test_a_log_ratio_is_bounded():
    assert log_ratio(torch.tensor([0.5, 100.0, -100.0]), torch.zeros(3)).tolist() == [0.5, 20.0, -20.0]


def test_the_surrogate_is_bounded_on_the_side_of_its_gain():
    # Ratios 1.3, 0.7 and e^20 (log-ratios are cut there), each with a gain of 2 and of -2; bounds 0.8 and 1.2.
    logprobs_N = torch.tensor([math.log(1.3)] * 2 + [math.log(0.7)] * 2 + [50.0] * 2, dtype=torch.float64)
    logprobs_N.requires_grad_()
    advantages_N = torch.tensor([2.0, -2.0] * 3, dtype=torch.float64)
    log_ratio_N = log_ratio(logprobs_N, torch.zeros(6, dtype=torch.float64))
    priced = clipped_surrogate(log_ratio_N, advantages_N, low=0.2, high=0.2)
    assert priced.loss_N.tolist() == pytest.approx([-2.4, 2.6, -1.4, 1.6, -2.4, 2.0 * math.exp(20.0)])
    priced.loss_N.sum().backward()
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, 2.6, -1.4, 0.0, 0.0, 0.0])
    assert priced.metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert not priced.metrics["ratio"].requires_grad


def test_the_bounds_are_two():
    # Of 1.25 and 0.75, with gains of 1 and -1: below 1.3 and above 0.6, but not within 0.9 and 1.1.
    log_ratio_N, advantages_N = torch.tensor([1.25, 0.75]).log(), torch.tensor([1.0, -1.0])
    for low, high, expected in ((0.4, 0.3, [-1.25, 0.75]), (0.1, 0.3, [-1.25, 0.9]), (0.4, 0.1, [-1.1, 0.75])):
        priced = clipped_surrogate(log_ratio_N, advantages_N, low=low, high=high)
        assert priced.loss_N.tolist() == pytest.approx(expected)


def test_a_divergence_is_added_where_it_counts():
    kl_N = torch.tensor([0.5, 2.0], requires_grad=True)
    zeros_N = torch.zeros(2)
    decisions = Decisions(
        logprobs_N=zeros_N,
        behaviour_logprobs_N=zeros_N,
        old_logprobs_N=None,
        entropy_N=None,
        advantages_N=zeros_N,
        sequence_N=torch.arange(2),
        num_sequences=2,
        frozen={"reference": FrozenOutput(logprobs_N=zeros_N, divergence_N=kl_N)},
    )
    priced = Loss(loss_N=torch.tensor([1.0, -1.0]), metrics={"ratio": zeros_N})
    assert add_divergence(priced, decisions, 0.0) is priced
    found = add_divergence(priced, decisions, 0.1)
    assert found.loss_N.tolist() == pytest.approx([1.05, -0.8])
    assert found.metrics["reference_kl"].tolist() == [0.5, 2.0]
    assert not found.metrics["reference_kl"].requires_grad
    assert {*found.metrics} == {"ratio", "reference_kl"}
    found.loss_N.sum().backward()
    assert kl_N.grad.tolist() == pytest.approx([0.1, 0.1])


def test_recomputed_log_probs_are_refused_where_other_weights_generated(subtests):
    assert refuse_recomputed(IN_STEP) is None
    for context, why in [
        ({"max_staleness": 3}, "samples up to 3 steps old would go uncorrected; set {}, or sync.mode = 'sync'"),
        ({"generates_average": True}, "would go uncorrected; set {}, or policy.average.publish = false"),
        (
            {"max_staleness": 1, "generates_average": True},
            "would go uncorrected; set {}, or sync.mode = 'sync' and policy.average.publish = false",
        ),
    ]:
        with subtests.test(context=context):
            recipe = attrs.evolve(IN_STEP, **context)
            problem = refuse_recomputed(recipe)
            assert problem is not None
            assert problem.startswith("old_logprobs = 'recompute': ")
            assert problem.endswith(why.format("old_logprobs = 'behaviour'"))
            told = refuse_recomputed(recipe, instead="cap (2.0 is usual)")
            assert told is not None
            assert told.endswith(why.format("cap (2.0 is usual), old_logprobs = 'behaviour'"))
