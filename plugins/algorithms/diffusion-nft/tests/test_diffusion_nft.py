"""DiffusionNFT against numbers worked by hand, and against its formulas in float64.

Shape legend: N decisions, K blends, D dimensions of a latent.
"""

import subprocess
import sys

import attrs
import pytest
import torch

from cosmos_algorithm_diffusion_nft import DiffusionNft, DiffusionNftOptions
from cosmos_algorithm_diffusion_nft.plugin import cosmos_algorithm
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.protocols.frozen import Blend, Blended, FrozenOutput
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=4, temperature=1.0, max_units=10, max_staleness=2, generates_average=True)


def make(**options):
    return DiffusionNft(DiffusionNftOptions(**options), CONTEXT)


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


def decisions(blended, advantages):
    number = len(advantages)
    zeros_N = torch.zeros(number, dtype=torch.float64)
    return Decisions(
        logprobs_N=zeros_N,
        behaviour_logprobs_N=zeros_N,
        old_logprobs_N=None,
        entropy_N=None,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.arange(number),
        num_sequences=number,
        frozen={"average": FrozenOutput(logprobs_N=zeros_N, blended=blended)},
    )


def told(v_ND, old_ND, x0_ND, e_ND, *, time, shares):
    """What a model says of blends at x_t, from their definition."""
    x_ND = (1 - time) * x0_ND + time * e_ND
    predicted = [x_ND - time * (share * v_ND + (1 - share) * old_ND) for share in shares]
    errors_NKD = torch.stack([each - x0_ND for each in predicted], 1)
    return Blended(squared_NK=errors_NKD.square().mean(-1), absolute_NK=errors_NKD.abs().mean(-1).detach())


def test_prices_worked_by_hand():
    squared_NK = torch.tensor([[0.5, 2.0]] * 4, dtype=torch.float64, requires_grad=True)
    absolute_NK = torch.tensor([[0.25, 1.0], [0.25, 1.0], [0.25, 1.0], [0.0, 1e-9]], dtype=torch.float64)
    blended = Blended(squared_NK=squared_NK, absolute_NK=absolute_NK)
    priced = make(beta=0.5).loss(decisions(blended, [5.0, -5.0, 1.0, 0.0]))
    # 5 / 0.5 = 10 times: wholly good 0.5 / 0.25; wholly bad 2 / 1; 0.6 and 0.4 of them; half of each over 1e-5.
    assert priced.loss_N.tolist() == pytest.approx([20.0, 20.0, 10 * (0.6 * 2.0 + 0.4 * 2.0), 10 * 1.25e5])
    told = {name: values.tolist() for name, values in priced.metrics.items()}
    assert told.pop("goodness") == pytest.approx([1.0, 0.0, 0.6, 0.5])
    assert told == {"good_error": [0.5] * 4, "bad_error": [2.0] * 4}
    priced.loss_N.sum().backward()
    # The weight 1 / w is detached; what is wholly good has no gradient through v⁻.
    assert squared_NK.grad[:3].flatten().tolist() == pytest.approx([40.0, 0.0, 0.0, 10.0, 24.0, 4.0])


def test_loss_and_gradient_are_those_of_the_paper():
    """Of velocities, by autograd in float64, for β = 0.7."""
    generator = torch.Generator().manual_seed(0)
    v_ND, old_ND, x0_ND, e_ND = (torch.randn(5, 6, generator=generator, dtype=torch.float64) for _ in range(4))
    v_ND.requires_grad_()
    time, beta, advantages = 0.6, 0.7, [2.0, -3.0, 5.0, -5.0, 0.0]
    algorithm = make(beta=beta)
    assert algorithm.consults == {"average": Blend(shares=(0.7, -0.7))}
    blended = told(v_ND, old_ND, x0_ND, e_ND, time=time, shares=algorithm.consults["average"].shares)
    priced = algorithm.loss(decisions(blended, advantages))
    (found_ND,) = torch.autograd.grad(priced.loss_N.sum(), v_ND)

    x_ND = (1 - time) * x0_ND + time * e_ND
    good_N = torch.tensor(advantages, dtype=torch.float64) / 5.0 / 2.0 + 0.5

    def error(velocity_ND):
        difference_ND = x_ND - time * velocity_ND - x0_ND
        return difference_ND.square().mean(-1) / difference_ND.detach().abs().mean(-1)

    positive_N = error(beta * v_ND + (1 - beta) * old_ND)
    negative_N = error((1 + beta) * old_ND - beta * v_ND)
    expected_N = 5.0 * (good_N * positive_N + (1 - good_N) * negative_N) / beta
    torch.testing.assert_close(priced.loss_N, expected_N)
    (expected_ND,) = torch.autograd.grad(expected_N.sum(), v_ND)
    torch.testing.assert_close(found_ND, expected_ND, rtol=1e-12, atol=1e-15)


def test_at_the_average_the_gradient_is_along_the_advantage():
    """Where v is v_old both errors are equal, and only 2 g - 1, which is A / A_max, is left of the two gradients."""
    generator = torch.Generator().manual_seed(1)
    old_ND, x0_ND, e_ND = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    advantages = [4.0, -2.0, 0.0]
    missed_ND = 0.5 * (old_ND - (e_ND - x0_ND))
    scale_N1 = torch.tensor(advantages, dtype=torch.float64)[:, None] / missed_ND.abs().mean(-1, keepdim=True)
    for beta in (0.1, 1.0):
        v_ND = old_ND.clone().requires_grad_()
        blended = told(v_ND, old_ND, x0_ND, e_ND, time=0.5, shares=(beta, -beta))
        priced = make(beta=beta).loss(decisions(blended, advantages))
        (found_ND,) = torch.autograd.grad(priced.loss_N.sum(), v_ND)
        torch.testing.assert_close(found_ND, scale_N1 * 2.0 * 0.5 * missed_ND / 6.0, rtol=1e-10, atol=1e-12)


def test_advantages_are_relative_and_limited():
    assert make(advantage_eps=0.0).advantages([group(1.0, 2.0, None, 3.0)]) == [[-1.0, 0.0, None, 1.0]]
    assert make(advantage_eps=0.0, advantage_limit=0.5).advantages([group(1.0, 2.0, 3.0)]) == [[-0.5, 0.0, 0.5]]
    assert make().advantages([group(0.2, 0.2)]) == [[0.0, 0.0]]


def test_it_learns_from_its_own_samples_alone():
    """A normal policy x = e - v whose average generates; what is higher is better, and the average follows."""
    algorithm, generator = make(beta=1.0), torch.Generator().manual_seed(0)
    v = torch.zeros((), dtype=torch.float64, requires_grad=True)
    average = v.detach().clone()
    first = last = 0.0
    for step in range(60):
        samples_N = torch.randn(16, generator=generator, dtype=torch.float64) - average
        last = samples_N.mean().item()
        first = first if step else last
        advantages = algorithm.advantages([group(*samples_N.tolist())])[0]
        x0_ND, e_ND = samples_N[:, None], torch.randn(16, 1, generator=generator, dtype=torch.float64)
        blended = told(v.expand(16, 1), average.expand(16, 1), x0_ND, e_ND, time=0.8, shares=(1.0, -1.0))
        (gradient,) = torch.autograd.grad(algorithm.loss(decisions(blended, advantages)).loss_N.mean(), v)
        v = (v - 0.05 * gradient).detach().requires_grad_()
        average = 0.5 * average + 0.5 * v.detach()
    assert last > first + 1.0


def test_what_it_needs_and_declares():
    with pytest.raises(ConfigError, match=r"^policy\.average\.publish: .*add a table \[policy\.average\]"):
        DiffusionNft(DiffusionNftOptions(), attrs.evolve(CONTEXT, generates_average=False))
    algorithm = make()
    assert not algorithm.skips_zero_advantage
    assert algorithm.old_logprobs == "none"
    capabilities = cosmos_algorithm().capabilities
    assert capabilities.payload_kinds == {"latents"}
    assert "raw" in capabilities.logprob_semantics


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_algorithm_diffusion_nft.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
