"""The surrogate against numbers worked by hand, its gradients against finite differences."""

import math

import pytest
import torch

from cosmos_algorithm_grpo.surrogate import Clip, clipped_surrogate

CLIP = Clip(low=0.2, high=0.3)


def price(ratios, advantages, clip=CLIP):
    old_N = torch.zeros(len(ratios), dtype=torch.float64)
    logprobs_N = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)
    advantages_N = torch.tensor(advantages, dtype=torch.float64)
    return logprobs_N, clipped_surrogate(
        logprobs_N=logprobs_N, old_logprobs_N=old_N, advantages_N=advantages_N, clip=clip
    )


def test_each_case_of_the_clip():
    #                 A > 0: free, above high, below low;  A < 0: free, above high, below low
    ratios = [1.1, 1.5, 0.5, 1.1, 1.5, 0.5]
    _, priced = price(ratios, [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    expected = [-2.2, -2.6, -1.0, 2.2, 3.0, 1.6]
    assert priced.loss_N.tolist() == pytest.approx(expected)
    assert priced.metrics["clip_fraction"].tolist() == [0, 1, 0, 0, 0, 1]
    assert priced.metrics["ratio"].tolist() == pytest.approx(ratios)


def test_the_gradient_is_ratio_times_advantage_unless_clipped():
    logprobs_N, priced = price([1.1, 1.5, 0.5, 1.1, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    priced.loss_N.sum().backward()
    assert logprobs_N.grad.tolist() == pytest.approx([-2.2, 0.0, -1.0, 2.2, 3.0, 0.0])


def test_dual_clip_bounds_negative_advantages_only():
    logprobs_N, priced = price([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], Clip(low=0.2, high=0.3, dual=3.0))
    priced.loss_N.sum().backward()
    assert priced.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.3])
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert priced.metrics["clip_fraction"].tolist() == [1, 0, 1]


@pytest.mark.parametrize("clip", [CLIP, Clip(low=0.2, high=0.3, dual=3.0)])
def test_gradients_agree_with_finite_differences(clip):
    generator = torch.Generator().manual_seed(0)
    old_N = torch.randn(64, dtype=torch.float64, generator=generator)
    advantages_N = torch.randn(64, dtype=torch.float64, generator=generator)
    logprobs_N = (old_N + 0.7 * torch.randn(64, dtype=torch.float64, generator=generator)).requires_grad_()

    def total(values_N):
        return clipped_surrogate(logprobs_N=values_N, old_logprobs_N=old_N, advantages_N=advantages_N, clip=clip).loss_N

    assert torch.autograd.gradcheck(total, (logprobs_N,))


def test_an_advantage_of_zero_has_exactly_no_gradient_even_at_absurd_ratios():
    logprobs_N = torch.tensor([0.0, 500.0, -500.0], requires_grad=True)
    priced = clipped_surrogate(
        logprobs_N=logprobs_N,
        old_logprobs_N=torch.zeros(3),
        advantages_N=torch.zeros(3),
        clip=Clip(low=0.2, high=0.2, dual=3.0),
    )
    priced.loss_N.sum().backward()
    assert priced.loss_N.tolist() == [0.0, 0.0, 0.0]
    assert logprobs_N.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_logprob_that_is_no_number_stays_visible():
    _, priced = price([1.0], [1.0])
    broken = clipped_surrogate(
        logprobs_N=torch.tensor([math.nan]), old_logprobs_N=torch.zeros(1), advantages_N=torch.ones(1), clip=CLIP
    )
    assert not torch.isfinite(broken.loss_N).any()
    assert torch.isfinite(priced.loss_N).all()
