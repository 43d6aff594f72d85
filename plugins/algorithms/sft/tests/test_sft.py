"""Cross entropy on demonstrations."""

import subprocess
import sys

import pytest
import torch

from cosmos_algorithm_sft import Sft, SftOptions
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=1, temperature=1.0, max_units=10, max_staleness=0)


def test_the_loss_is_torch_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    target_N = torch.tensor([0, 3, 6, 2, 2])
    logprobs_N = logits_NV.log_softmax(-1).gather(-1, target_N[:, None])[:, 0]
    zeros_N = torch.zeros(5, dtype=torch.float64)
    decisions = Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=zeros_N,
        old_logprobs_N=None,
        entropy_N=None,
        advantages_N=zeros_N,
        sequence_N=torch.zeros(5, dtype=torch.int64),
        num_sequences=1,
    )
    loss = Sft(SftOptions(), CONTEXT).loss(decisions).loss_N
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="none"))
    (gradient_NV,) = torch.autograd.grad(loss.sum(), logits_NV)
    expected_NV = logits_NV.detach().softmax(-1) - torch.nn.functional.one_hot(target_N, 7)
    torch.testing.assert_close(gradient_NV, expected_NV)


def test_no_sample_has_an_advantage_and_no_old_logprobs_are_needed():
    algorithm = Sft(SftOptions(), CONTEXT)
    assert not algorithm.skips_zero_advantage
    assert algorithm.old_logprobs == "none"
    assert not algorithm.needs_entropy
    assert algorithm.aggregation is Aggregation.TOKEN_MEAN
    per_row = Sft(SftOptions(aggregation="sequence-mean-token-mean"), CONTEXT)
    assert per_row.aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    sample = Sample(
        index=0,
        status=SampleStatus.OK,
        reward=None,
        rewards={},
        oldest_version=0,
        newest_version=0,
        num_units=1,
        num_prompt_units=1,
    )
    group = Group(position=0, samples=(sample,))
    assert Sft(SftOptions(), CONTEXT).advantages([group]) == [[None]]
    assert Sft(SftOptions(), CONTEXT).admit(group) is None


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_algorithm_sft.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
