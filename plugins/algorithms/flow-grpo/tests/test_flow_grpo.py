"""FlowGRPO against numbers worked by hand, and against its formulas in float64.

Shape legend: N denoising steps, D dimensions of a latent.
"""

import math
import subprocess
import sys

import attrs
import pytest
import torch

from cosmos_algorithm_flow_grpo import FlowGrpo, FlowGrpoOptions
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.protocols.frozen import Divergence, FrozenOutput
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=4, temperature=1.0, max_units=10, max_staleness=2)


def make(**options):
    return FlowGrpo(FlowGrpoOptions(**options), CONTEXT)


def group(*rewards):
    return Group(
        position=0,
        samples=tuple(
            Sample(
                index=index,
                status=SampleStatus.OK,
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


def decisions(logprobs_N, old_N, advantages, **more):
    number = len(advantages)
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=old_N,
        old_logprobs_N=old_N,
        entropy_N=None,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.arange(number),
        num_sequences=number,
        **more,
    )


def test_prices_and_gradients_at_either_side_of_the_clip():
    # Ratios 1.0002, 0.9998 and 1: beyond, below and within 1 ± 1e-4.
    ratios = [1.0002, 1.0002, 0.9998, 0.9998, 1.0, 1.0]
    logprobs_N = torch.tensor([math.log(each) for each in ratios], dtype=torch.float64, requires_grad=True)
    priced = make().loss(decisions(logprobs_N, torch.zeros(6, dtype=torch.float64), [2.0, -2.0] * 3))
    expected = [-2.0002, 2.0004, -1.9996, 1.9998, -2.0, 2.0]
    assert priced.loss_N.tolist() == pytest.approx(expected, abs=1e-12)
    priced.loss_N.sum().backward()
    # Where the bound took over the price, the gradient is gone: good enough, or bad enough, already.
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, 2.0004, -1.9996, 0.0, -2.0, 2.0], abs=1e-12)
    assert priced.metrics["ratio"].tolist() == pytest.approx(ratios)
    assert priced.metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_ratios_that_would_correct_nothing_are_refused():
    """On samples of the average the ratio of the trained weights with themselves would be 1, whatever was sampled."""
    context = attrs.evolve(CONTEXT, max_staleness=0, generates_average=True)
    with pytest.raises(ConfigError, match=r"old_logprobs = 'recompute'.*policy\.average\.publish = false"):
        FlowGrpo(FlowGrpoOptions(old_logprobs="recompute"), context)
    assert FlowGrpo(FlowGrpoOptions(), context).old_logprobs == "behaviour"
    with pytest.raises(ConfigError, match="samples up to 2 steps old would go uncorrected"):
        make(old_logprobs="recompute")


def test_advantages_by_hand():
    # Mean 1: squares 7 · 1 + 49 over n - 1 = 7.
    rewards = [0.0] * 7 + [8.0]
    std = math.sqrt((7 * 1.0 + 49.0) / 7)
    assert make().advantages([group(*rewards)])[0] == pytest.approx([-1.0 / (std + 1e-4)] * 7 + [7.0 / (std + 1e-4)])
    limited = make(advantage_limit=0.25).advantages([group(*rewards)])[0]
    assert limited == [-0.25] * 7 + [0.25]
    # The default limit is reached by no group of fewer than 27.
    assert max(make().advantages([group(*[0.0] * 47, 1.0)])[0]) == 5.0
    # Group means 1 and 5 are taken off; rewards 0, 2, 4, 6 have a deviation of sqrt(20 / 3) about 3.
    found = make(spread="batch", advantage_eps=0.0).advantages([group(0.0, 2.0), group(4.0, 6.0)])
    assert found == [pytest.approx([-1.0 / math.sqrt(20 / 3), 1.0 / math.sqrt(20 / 3)])] * 2


def test_what_teaches_nothing_is_skipped_or_dropped():
    assert make().advantages([group(0.1, 0.1, 0.1)]) == [[0.0, 0.0, 0.0]]
    assert make().skips_zero_advantage
    assert make().admit(group(0.0, math.nan)) == "reward not finite"
    assert make().admit(group(0.0, 0.0)) is None


def transition(v_ND, reference_ND, *, time, ahead, noise=0.7):
    """Log-probs and KL of steps of the SDE of 2505.05470 from their definitions, over D independent dimensions."""
    generator = torch.Generator().manual_seed(1)
    s, dt = noise * math.sqrt(time / (1 - time)), ahead - time
    x_ND = torch.randn(v_ND.shape, generator=generator, dtype=torch.float64)

    def normal(velocity_ND):
        drift_ND = velocity_ND + s**2 / (2 * time) * (x_ND + (1 - time) * velocity_ND)
        return torch.distributions.Normal(x_ND + drift_ND * dt, s * math.sqrt(-dt))

    taken_ND = normal(v_ND.detach()).sample()
    kl_ND = torch.distributions.kl_divergence(normal(v_ND), normal(reference_ND))
    return normal(v_ND).log_prob(taken_ND), kl_ND


def test_loss_and_gradient_are_those_of_the_paper():
    """KL in closed form, by autograd in float64 from velocities to the loss."""
    generator = torch.Generator().manual_seed(0)
    v_ND = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference_ND = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    logprob_ND, kl_ND = transition(v_ND, reference_ND, time=0.8, ahead=0.7)
    closed_ND = 0.05 * (1 / 1.4 + 1.4 * 0.2 / 1.6) ** 2 * (v_ND - reference_ND).square()
    torch.testing.assert_close(kl_ND, closed_ND, rtol=1e-12, atol=0.0)
    logprobs_N, old_N = logprob_ND.mean(-1), logprob_ND.mean(-1).detach()
    advantages = [1.0, -0.5, 2.0, -1.5]
    output = FrozenOutput(logprobs_N=old_N, divergence_N=kl_ND.mean(-1))
    algorithm = make(kl_weight=0.04)
    assert algorithm.consults == {"reference": Divergence(kind="reverse-kl")}
    assert not algorithm.skips_zero_advantage
    priced = algorithm.loss(decisions(logprobs_N, old_N, advantages, frozen={"reference": output}))
    (found_ND,) = torch.autograd.grad(priced.loss_N.sum(), v_ND, retain_graph=True)
    expected_N = -torch.tensor(advantages, dtype=torch.float64) * logprobs_N + 0.04 * closed_ND.mean(-1)
    (expected_ND,) = torch.autograd.grad(expected_N.sum(), v_ND)
    torch.testing.assert_close(found_ND, expected_ND, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(priced.metrics["reference_kl"], closed_ND.mean(-1).detach())


def test_the_clip_stops_what_several_updates_of_one_sample_do():
    """With one update the ratio is 1 and no bound is ever met; here one sample is learnt from again and again."""

    def moved(clip):
        mean_D = torch.zeros(8, dtype=torch.float64, requires_grad=True)
        taken_D = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)
        old_N = (-(taken_D.square()) / 2).mean()[None]
        for _ in range(40):
            logprobs_N = (-((taken_D - mean_D).square()) / 2).mean()[None]
            priced = make(clip=clip).loss(decisions(logprobs_N, old_N, [1.0]))
            (gradient_D,) = torch.autograd.grad(priced.loss_N.sum(), mean_D)
            mean_D = (mean_D - 0.01 * gradient_D).detach().requires_grad_()
        return priced.metrics["ratio"].item() - 1.0, priced.metrics["clip_fraction"].item()

    (near, is_clipped), (far, is_free) = moved(1e-3), moved(1.0)
    assert 1e-3 < near < 2e-3
    assert is_clipped == 1.0
    assert is_free == 0.0
    assert far > 10 * near


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_algorithm_flow_grpo.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
