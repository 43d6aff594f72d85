"""Ratios of sequences."""

import math

import pytest
import torch

from cosmos_algorithm_grpo.ratio import mean_of_sequence, sequence_log_ratio

SEQUENCE_N = torch.tensor([0, 0, 0, 2])


def test_means_are_over_sequences_and_one_may_have_no_decision():
    assert mean_of_sequence(torch.tensor([1.0, 2.0, 6.0, 5.0]), SEQUENCE_N, 3).tolist() == [3.0, 3.0, 3.0, 5.0]


def test_the_ratio_of_a_sequence_is_the_geometric_mean_by_hand():
    # (2 · 4 · 1/8) ^ (1/3) = 1, and 3
    logprobs_N = torch.tensor([2.0, 4.0, 0.125, 3.0]).log()
    ratio_N = sequence_log_ratio(logprobs_N, torch.zeros(4), SEQUENCE_N, 3).exp()
    assert ratio_N.tolist() == pytest.approx([1.0, 1.0, 1.0, 3.0])


def test_its_gradient_is_that_of_the_paper_once_prices_are_added_up():
    """Equation 10 of 2507.18071: s A / length for each decision, of the mean over sequences of s A."""
    generator = torch.Generator().manual_seed(0)
    logprobs_N = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_()
    old_N = torch.randn(4, dtype=torch.float64, generator=generator)
    advantages_N = torch.tensor([2.0, 2.0, 2.0, -1.0], dtype=torch.float64)
    ratio_N = sequence_log_ratio(logprobs_N, old_N, SEQUENCE_N, 3).exp()
    (ours_N,) = torch.autograd.grad((ratio_N * advantages_N / torch.tensor([3, 3, 3, 1])).sum(), logprobs_N)
    first = (logprobs_N[:3] - old_N[:3]).mean().exp()
    second = (logprobs_N[3] - old_N[3]).exp()
    (papers_N,) = torch.autograd.grad(2.0 * first - second, logprobs_N)
    torch.testing.assert_close(ours_N, papers_N)


def test_a_decision_that_became_impossible_counts_within_bounds():
    ratio_N = sequence_log_ratio(torch.tensor([-500.0, 0.0]), torch.zeros(2), torch.tensor([0, 0]), 1).exp()
    assert ratio_N.tolist() == pytest.approx([math.exp(-10.0)] * 2)
