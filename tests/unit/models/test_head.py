from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cosmos_core.models import head
from cosmos_core.models.head import Vocabulary
from cosmos_core.models.parallel.collectives import copy_to_group
from cosmos_core.testing.worlds import run_world


def evaluate(hidden, weight, targets, **options):
    settings = {
        "vocabulary": Vocabulary(start=0, size=len(weight)),
        "temperature": 1.0,
        "with_entropy": False,
        **options,
    }
    return head.evaluate(lambda x: x @ weight.T, hidden, targets, **settings)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, 11, (7,), generator=generator)


def test_logprobs_and_entropy(subtests, inputs):
    for temperature in [1.0, 0.5]:
        with subtests.test(temperature=temperature):
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
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 22)
    rows = []
    chunked = head.evaluate(
        lambda x: rows.append(len(x)) or x @ weight.T,
        hidden,
        targets,
        vocabulary=Vocabulary(start=0, size=11),
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


def test_chunks_add_up_the_weights_gradient_in_float32(inputs, monkeypatch):
    """In bfloat16 the sum of 300 chunks would be off by percents."""
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 11)
    hidden, weight = (each.detach().bfloat16() for each in inputs[:2])
    hidden, targets, errors = hidden.repeat(50, 1), inputs[2].repeat(50), []
    exact = weight.float().requires_grad_()
    evaluate(hidden.float(), exact, targets).logprobs_N.sum().backward()
    layer = torch.nn.Linear(5, 11, bias=False, dtype=torch.bfloat16)
    for output in (layer, None):
        layer.weight = torch.nn.Parameter(weight.clone())
        settings = {"vocabulary": Vocabulary(start=0, size=11), "temperature": 1.0, "with_entropy": False}
        head.evaluate(layer, hidden, targets, output=output, **settings).logprobs_N.sum().backward()
        errors.append((layer.weight.grad.float() - exact.grad).norm() / exact.grad.norm())
    assert errors[0] < 0.005 < errors[1]


def test_logits_that_are_held_at_once_are_a_share_of_a_gpus_memory(monkeypatch):
    cuda, most = torch.device("cuda"), head.CHUNK_ELEMENTS["cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (head.most_logits(cuda), head.most_logits(torch.device("cpu"))) == (most, head.CHUNK_ELEMENTS["cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for memory, expected in [(139 << 30, most), (80 << 30, most // 2), (79 << 30, most // 2), (24 << 30, most // 8)]:
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert head.most_logits(cuda) == expected
        assert 4 * expected <= memory / 128


def test_a_split_vocabulary_gives_the_same_on_each_process(subtests):
    for size in [12, 11]:
        for chunk in [1 << 25, 10]:
            with subtests.test(size=size, chunk=chunk):
                (hidden, weight, targets), scores = draw(size), torch.arange(7.0)
                whole = evaluate(hidden, weight, targets, temperature=0.5, with_entropy=True)
                expected = torch.autograd.grad((whole.logprobs_N * scores).sum(), (hidden, weight))
                results = run_world(2, split, chunk, size)
                for rank, (logprobs_N, entropy_N, hidden_grad, weight_grad) in enumerate(results):
                    torch.testing.assert_close(logprobs_N, whole.logprobs_N.detach())
                    torch.testing.assert_close(entropy_N, whole.entropy_N)
                    torch.testing.assert_close(hidden_grad, expected[0])
                    torch.testing.assert_close(weight_grad, expected[1][rank * 6 : rank * 6 + 6])
                assert torch.equal(results[0][0], results[1][0])


def draw(size):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    weight = torch.randn(size, 5, generator=generator)
    # A token that cannot come has no share in the entropy.
    weight[3] = -1e4 * hidden.detach().mean(0)
    return hidden, weight.requires_grad_(), torch.randint(4, size, (7,), generator=generator)


def split(chunk, size):
    head.CHUNK_ELEMENTS["cpu"] = chunk
    hidden, weight, targets = draw(size)
    group, rank = dist.group.WORLD, dist.get_rank()
    part = weight.detach()[rank * 6 : rank * 6 + 6].clone().requires_grad_()
    decided = head.evaluate(
        lambda each: copy_to_group(each, group) @ part.T,
        hidden,
        targets,
        vocabulary=Vocabulary(start=rank * 6, size=len(part), most=6, group=group),
        temperature=0.5,
        with_entropy=True,
    )
    grads = torch.autograd.grad((decided.logprobs_N * torch.arange(7.0)).sum(), (hidden, part))
    return decided.logprobs_N.detach(), decided.entropy_N, *grads
