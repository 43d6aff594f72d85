"""The surrogates against numbers worked by hand, their gradients against finite differences."""

import math

import pytest
import torch

from cosmos_algorithm_grpo.surrogate import Clip, Weight
from cosmos_core.protocols.objectives import log_ratio

CLIP = Clip(low=0.2, high=0.3)


def price_of(surrogate, logprobs_N, old_N, advantages_N):
    return surrogate(logprobs_N=logprobs_N, log_ratio_N=log_ratio(logprobs_N, old_N), advantages_N=advantages_N)


def price(ratios, advantages, surrogate=CLIP, old=0.0):
    old_N = torch.full((len(ratios),), old, dtype=torch.float64)
    logprobs_N = (old_N + torch.tensor([math.log(ratio) for ratio in ratios])).requires_grad_()
    priced = price_of(surrogate, logprobs_N, old_N, torch.tensor(advantages, dtype=torch.float64))
    return logprobs_N, priced


def gradient(logprobs_N, priced):
    priced.loss_N.sum().backward()
    return logprobs_N.grad.tolist()


def test_each_case_of_the_clip():
    #                 A > 0: free, above high, below low;  A < 0: free, above high, below low
    ratios = [1.1, 1.5, 0.5, 1.1, 1.5, 0.5]
    logprobs_N, priced = price(ratios, [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    assert priced.loss_N.tolist() == pytest.approx([-2.2, -2.6, -1.0, 2.2, 3.0, 1.6])
    assert priced.metrics["clip_fraction"].tolist() == [0, 1, 0, 0, 0, 1]
    assert priced.metrics["ratio"].tolist() == pytest.approx(ratios)
    assert gradient(logprobs_N, priced) == pytest.approx([-2.2, 0.0, -1.0, 2.2, 3.0, 0.0])


def test_a_clip_without_a_lower_bound():
    logprobs_N, priced = price([0.1, 1.5], [-1.0, 1.0], Clip(low=1.0, high=0.2))
    assert priced.loss_N.tolist() == pytest.approx([0.1, -1.2])
    assert gradient(logprobs_N, priced) == pytest.approx([0.1, 0.0])


def test_dual_clip_bounds_negative_advantages_only():
    logprobs_N, priced = price([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], Clip(low=0.2, high=0.3, dual=3.0))
    assert priced.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.3])
    assert gradient(logprobs_N, priced) == pytest.approx([0.0, 2.0, 0.0])
    assert priced.metrics["clip_fraction"].tolist() == [1, 0, 1]


def test_a_weight_is_bounded_and_never_takes_the_gradient():
    """A clamp that the gradient goes through would give 0 for the first and the last."""
    logprobs_N, priced = price([6.0, 2.0, 0.1], [1.0, -1.0, 2.0], Weight(floor=0.5, cap=4.0), old=-1.0)
    by_hand = [-4.0 * (math.log(6.0) - 1.0), 2.0 * (math.log(2.0) - 1.0), -0.5 * 2.0 * (math.log(0.1) - 1.0)]
    assert priced.loss_N.tolist() == pytest.approx(by_hand)
    assert gradient(logprobs_N, priced) == pytest.approx([-4.0, 2.0, -1.0])
    assert priced.metrics["clip_fraction"].tolist() == [1, 0, 1]
    assert priced.metrics["ratio"].tolist() == pytest.approx([6.0, 2.0, 0.1])


def test_a_weight_without_bounds_is_the_ratio():
    logprobs_N, priced = price([60.0, 0.01], [1.0, 1.0], Weight(floor=0.0, cap=math.inf))
    assert gradient(logprobs_N, priced) == pytest.approx([-60.0, -0.01])


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old_N = torch.randn(64, dtype=torch.float64, generator=generator)
    advantages_N = torch.randn(64, dtype=torch.float64, generator=generator)
    drawn_N = old_N + 0.7 * torch.randn(64, dtype=torch.float64, generator=generator)
    for clip in (CLIP, Clip(low=0.2, high=0.3, dual=3.0), Clip(low=1.0, high=0.3)):

        def loss(values_N, clip=clip):
            return price_of(clip, values_N, old_N, advantages_N).loss_N

        assert torch.autograd.gradcheck(loss, drawn_N.clone().requires_grad_())


def test_an_advantage_of_zero_has_exactly_no_gradient_even_at_absurd_ratios():
    for surrogate in (Clip(low=0.2, high=0.2, dual=3.0), Weight(floor=0.0, cap=math.inf)):
        logprobs_N = torch.tensor([0.0, 500.0, -500.0], requires_grad=True)
        priced = price_of(surrogate, logprobs_N, torch.zeros(3), torch.zeros(3))
        assert priced.loss_N.tolist() == [0.0, 0.0, 0.0]
        assert gradient(logprobs_N, priced) == [0.0, 0.0, 0.0]


def test_a_logprob_that_is_no_number_stays_visible():
    for surrogate in (CLIP, Weight(floor=0.0, cap=2.0)):
        broken = price_of(surrogate, torch.tensor([math.nan]), torch.zeros(1), torch.ones(1))
        assert not torch.isfinite(broken.loss_N).any()
