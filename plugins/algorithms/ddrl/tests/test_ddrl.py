"""DDRL against numbers worked by hand, and against its formulas in float64.

Shape legend: N decisions, D dimensions of a latent.
"""

import math
import subprocess
import sys

import pytest
import torch

from cosmos_algorithm_ddrl import Ddrl, DdrlOptions
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=4, temperature=1.0, max_units=10, max_staleness=2)


def make(**options):
    return Ddrl(DdrlOptions(**options), CONTEXT)


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
                num_units=2,
                num_prompt_units=0,
            )
            for index, reward in enumerate(rewards)
        ),
    )


def decisions(logprobs_N, old_N, advantages):
    number = len(advantages)
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.zeros(number, dtype=torch.float64),
        old_logprobs_N=old_N,
        entropy_N=None,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.arange(number),
        num_sequences=number,
    )


def test_the_exponential_makes_bad_samples_count_more_than_good_ones():
    # Relative rewards of 0, 1, 2 are -1, 0, 1 (deviation 1): -e, -1, -1/e.
    plain, transformed = (
        make(exponential=each, advantage_eps=0.0).advantages([group(0.0, 1.0, None, 2.0)])[0] for each in (False, True)
    )
    assert plain == [-1.0, 0.0, None, 1.0]
    assert transformed == [pytest.approx(-math.e), -1.0, None, pytest.approx(-1.0 / math.e)]
    # The worst of 0 and 12 ones: relative reward -12 / sqrt(13), of which the exponential is -27.9, and limited.
    rewards = [0.0] + [1.0] * 12
    assert make(advantage_eps=0.0).advantages([group(*rewards)])[0][0] == pytest.approx(-12.0 / math.sqrt(13.0))
    found = make(exponential=True, advantage_eps=0.0).advantages([group(*rewards)])[0]
    assert found == [-5.0, *[pytest.approx(-math.exp(-1.0 / math.sqrt(13.0)))] * 12]
    assert make().advantages([group(0.3, 0.3, None)]) == [[0.0, 0.0, None]]


def test_prices_and_gradients_at_either_side_of_the_clip():
    ratios = [1.0002, 1.0002, 0.9998, 0.9998, 1.0]
    logprobs_N = torch.tensor([math.log(each) for each in ratios], dtype=torch.float64, requires_grad=True)
    old_N = torch.zeros(5, dtype=torch.float64)
    priced = make().loss(decisions(logprobs_N, old_N, [2.0, -2.0, 2.0, -2.0, 2.0]))
    assert priced.loss_N.tolist() == pytest.approx([-2.0002, 2.0004, -1.9996, 1.9998, -2.0], abs=1e-12)
    priced.loss_N.sum().backward()
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, 2.0004, -1.9996, 0.0, -2.0], abs=1e-12)


def test_the_data_term_is_the_flow_matching_loss_of_the_demonstrations():
    """Of velocities v towards samples x_0 from noise e, by autograd in float64."""
    generator = torch.Generator().manual_seed(0)
    v_ND, e_ND, x0_ND = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    v_ND.requires_grad_()
    diffusion_N = (v_ND - (e_ND - x0_ND)).square().mean(-1)
    algorithm = make(data_weight=0.01, demonstrations=2)
    assert algorithm.num_demonstrations == 2
    priced = algorithm.imitation(decisions(-diffusion_N, None, [1.0] * 3))
    torch.testing.assert_close(priced.loss_N, 0.01 * diffusion_N)
    torch.testing.assert_close(priced.metrics["data_loss"], diffusion_N.detach())
    (found_ND,) = torch.autograd.grad(priced.loss_N.sum(), v_ND)
    torch.testing.assert_close(found_ND, 0.01 * 2.0 / 5.0 * (v_ND - (e_ND - x0_ND)).detach())


def test_data_holds_a_policy_that_the_reward_alone_would_carry_away():
    """Samples of a normal policy are rewarded the more the higher they are; data lies about 0."""

    def settled(data_weight):
        algorithm, generator = make(data_weight=data_weight), torch.Generator().manual_seed(3)
        mean = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for _ in range(150):
            taken_N = mean.detach() + torch.randn(16, generator=generator, dtype=torch.float64)
            logprobs_N = -(taken_N - mean).square() / 2.0
            advantages = algorithm.advantages([group(*taken_N.tolist())])[0]
            rollouts = algorithm.loss(decisions(logprobs_N, logprobs_N.detach(), advantages))
            data_N = torch.randn(16, generator=generator, dtype=torch.float64)
            imitated = algorithm.imitation(decisions(-(mean - data_N).square(), None, [1.0] * 16))
            (gradient,) = torch.autograd.grad(rollouts.loss_N.mean() + imitated.loss_N.mean(), mean)
            mean = (mean - 0.05 * gradient).detach().requires_grad_()
        return mean.item()

    free, held, pinned = settled(1e-6), settled(0.5), settled(5.0)
    assert free > 5.0
    # The gradient of the reward is 1 for a normal policy, that of the data 2 weight · mean.
    assert held == pytest.approx(1.0, abs=0.35)
    assert pinned == pytest.approx(0.1, abs=0.2)


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_algorithm_ddrl.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
