"""Estimators of the divergence: by hand, and in expectation against the divergence itself."""

import math

import pytest
import torch

from cosmos_algorithm_grpo.kl import kl_estimate


def test_each_by_hand():
    # d = log(ref / policy) = log 2
    logprobs_N, reference_N = torch.tensor([0.0], dtype=torch.float64), torch.tensor([math.log(2.0)])
    assert kl_estimate(logprobs_N, reference_N, "k1").item() == pytest.approx(-math.log(2.0))
    assert kl_estimate(logprobs_N, reference_N, "k2").item() == pytest.approx(math.log(2.0) ** 2 / 2)
    assert kl_estimate(logprobs_N, reference_N, "k3").item() == pytest.approx(2.0 - 1.0 - math.log(2.0))


def test_it_is_finite_however_far():
    for estimator in ("k1", "k2", "k3"):
        logprobs_N = torch.tensor([0.0, -100.0], requires_grad=True)
        values_N = kl_estimate(logprobs_N, torch.tensor([-100.0, 0.0]), estimator)
        values_N.sum().backward()
        assert values_N.isfinite().all(), estimator
        assert logprobs_N.grad.isfinite().all(), estimator


def mean_gradient(estimator):
    """The expectation over decisions of the estimate and of its gradient, by enumeration of a small vocabulary."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    reference_V = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    estimates_V = kl_estimate(logprobs_V, reference_V, estimator)
    mean = logprobs_V.detach().exp() @ estimates_V
    (gradient_V,) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    true = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    (true_gradient_V,) = torch.autograd.grad(true, logits_V, retain_graph=True)
    reverse = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    (reverse_gradient_V,) = torch.autograd.grad(reverse, logits_V)
    return mean.item(), true.item(), gradient_V, true_gradient_V, reverse_gradient_V


def test_what_the_docstring_says_of_means_and_gradients():
    for estimator in ("k1", "k3"):
        mean, true, *_ = mean_gradient(estimator)
        assert mean == pytest.approx(true)
    _, _, k1_V, _, _ = mean_gradient("k1")
    torch.testing.assert_close(k1_V, torch.zeros_like(k1_V))
    _, _, k2_V, true_V, _ = mean_gradient("k2")
    torch.testing.assert_close(k2_V, true_V)
    _, _, k3_V, _, reverse_V = mean_gradient("k3")
    torch.testing.assert_close(k3_V, reverse_V)


def test_only_k1_taken_off_the_reward_has_the_gradient_of_the_divergence():
    """The score function times a detached estimate."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    reference_V = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    true = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    (true_V,) = torch.autograd.grad(true, logits_V, retain_graph=True)
    for estimator, is_right in (("k1", True), ("k2", False), ("k3", False)):
        penalty_V = kl_estimate(logprobs_V, reference_V, estimator).detach()
        (found_V,) = torch.autograd.grad(
            (logprobs_V.detach().exp() * penalty_V) @ logprobs_V, logits_V, retain_graph=True
        )
        assert torch.allclose(found_V, true_V) is is_right
