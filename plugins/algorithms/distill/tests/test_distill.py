"""Distillation against its formulas."""

import subprocess
import sys

import pytest
import torch

from cosmos_algorithm_distill import DistillOptions, ExactDistillation, SampledDistillation
from cosmos_algorithm_distill.plugin import make
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.protocols.frozen import Divergence, FrozenOutput
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=1, temperature=1.0, max_units=10, max_staleness=2)


def sample(index, status=SampleStatus.OK, reward=0.0):
    return Sample(
        index=index,
        status=status,
        reward=reward,
        rewards={},
        oldest_version=0,
        newest_version=0,
        num_units=1,
        num_prompt_units=1,
    )


def test_the_expected_gradient_of_the_sampled_estimate_is_that_of_the_divergence():
    """Summed over all tokens with their probabilities, in float64, against autograd of KL(policy || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logprobs_V = logits_V.log_softmax(-1)
    divergence = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    (expected,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    decisions = Decisions(
        logprobs_N=logprobs_V,
        behaviour_logprobs_N=logprobs_V.detach(),
        old_logprobs_N=None,
        entropy_N=None,
        advantages_N=torch.ones(6, dtype=torch.float64),
        sequence_N=torch.zeros(6, dtype=torch.int64),
        num_sequences=1,
        frozen={"teacher": FrozenOutput(logprobs_N=teacher_V)},
    )
    loss = SampledDistillation(DistillOptions(estimate="sampled")).loss(decisions)
    (found,) = torch.autograd.grad((loss.loss_N * logprobs_V.detach().exp()).sum(), logits_V)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    kl = (loss.metrics["teacher_kl"] * logprobs_V.detach().exp()).sum()
    assert kl.item() == pytest.approx(divergence.item())


def test_a_token_of_older_weights_counts_at_most_so_much():
    now_N = torch.tensor([-1.0, -1.0, -1.0])
    decisions = Decisions(
        logprobs_N=now_N.clone().requires_grad_(),
        behaviour_logprobs_N=torch.tensor([-1.0, -9.0, -0.3]),
        old_logprobs_N=None,
        entropy_N=None,
        advantages_N=torch.ones(3),
        sequence_N=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        frozen={"teacher": FrozenOutput(logprobs_N=now_N + 1.0)},
    )
    loss = SampledDistillation(DistillOptions(estimate="sampled", weight_cap=1.5)).loss(decisions)
    (gradient_N,) = torch.autograd.grad(loss.loss_N.sum(), decisions.logprobs_N)
    torch.testing.assert_close(gradient_N, -torch.tensor([1.0, 1.5, torch.exp(torch.tensor(-0.7)).item()]))


def test_it_asks_the_teacher_for_what_the_options_say():
    exact = make(DistillOptions(divergence="jsd", beta=0.1, top=8), CONTEXT)
    assert isinstance(exact, ExactDistillation)
    assert exact.consults == {"teacher": Divergence(kind="jsd", beta=0.1, top=8)}
    assert make(DistillOptions(estimate="sampled"), CONTEXT).consults == {"teacher": None}
    with pytest.raises(ConfigError, match="divergence: 'jsd', but estimate = 'sampled'"):
        make(DistillOptions(divergence="jsd", estimate="sampled"), CONTEXT)


def test_what_failed_is_not_learnt_from():
    algorithm = make(DistillOptions(), CONTEXT)
    failed = sample(1, SampleStatus.REWARD_FAILED, None)
    assert algorithm.advantages([Group(position=0, samples=(sample(0), failed))]) == [[1.0, None]]
    assert algorithm.admit(Group(position=0, samples=(failed,))) == "no completion finished"
    assert algorithm.admit(Group(position=0, samples=(sample(0), failed))) is None


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_algorithm_distill.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
