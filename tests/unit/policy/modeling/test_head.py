import pytest
import torch

from cosmos_core.policy.modeling import head


def evaluate(hidden, weight, targets, **options):
    settings = {"vocabulary": head.Vocabulary(start=0, size=len(weight)), "temperature": 1.0, "with_entropy": False, **options}
    return head.evaluate(lambda x: x @ weight.T, hidden, targets, **settings)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, 11, (7,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_and_entropy(inputs, temperature):
    hidden, weight, targets = inputs
    decided = evaluate(hidden, weight, targets, temperature=temperature, with_entropy=True)
    distribution = torch.distributions.Categorical(logits=(hidden @ weight.T) / temperature)
    torch.testing.assert_close(decided.logprobs_N, distribution.log_prob(targets))
    torch.testing.assert_close(decided.entropy_N, distribution.entropy().detach())
    assert not decided.entropy_N.requires_grad


def test_chunks_change_neither_values_nor_gradients(inputs, monkeypatch):
    hidden, weight, targets = inputs
    whole = evaluate(hidden, weight, targets, with_entropy=True)
    expected = torch.autograd.grad(whole.logprobs_N.square().sum(), (hidden, weight))
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 22)
    rows = []
    chunked = head.evaluate(
        lambda x: rows.append(len(x)) or x @ weight.T,
        hidden,
        targets,
        vocabulary=head.Vocabulary(start=0, size=11),
        temperature=1.0,
        with_entropy=True,
    )
    assert max(rows) == 2
    torch.testing.assert_close(chunked.logprobs_N, whole.logprobs_N)
    torch.testing.assert_close(chunked.entropy_N, whole.entropy_N)
    for mine, theirs in zip(
        torch.autograd.grad(chunked.logprobs_N.square().sum(), (hidden, weight)), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs)
