"""The output layer in chunks, on the device, against float64: values, gradients, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.models import head
from cosmos_core.models.head import Vocabulary
from cosmos_core.run.planning.memory import OUTPUT_COPIES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HIDDEN, DECISIONS = 256, 4096


def sized(device, monkeypatch):
    """The vocabulary, and the chunk: on a CPU both small, which takes as many chunks."""
    if device.type == "cuda":
        return 151_936, head.most_logits(device)
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", DECISIONS * 2000 // 3)
    return 2000, head.CHUNK_ELEMENTS["cpu"]


def exact(hidden, weight, targets, temperature):
    """Log-probabilities, entropies and gradients of the sum of log-probabilities, in float64, some rows at once."""
    rows, leaves = [], [each.detach().double().requires_grad_() for each in (hidden, weight)]
    for part, own in zip(leaves[0].split(256), targets.split(256), strict=True):
        logprobs = torch.log_softmax(part @ leaves[1].T / temperature, -1)
        picked = logprobs.gather(-1, own[:, None])[:, 0]
        picked.sum().backward()
        rows.append((picked.detach(), -(logprobs.exp() * logprobs).sum(-1).detach()))
    return [torch.cat(each) for each in zip(*rows, strict=True)], [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_exact_values_and_gradients(device, precision, temperature, monkeypatch):
    size, _ = sized(device, monkeypatch)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    draw = torch.Generator().manual_seed(0)
    # Of numbers that 16 bits hold, so that only what is computed is rounded.
    hidden, weight = (
        torch.randn(rows, HIDDEN, generator=draw).div(4).bfloat16().to(device, dtype) for rows in (DECISIONS, size)
    )
    targets = torch.randint(0, size, (DECISIONS,), generator=draw).to(device)
    layer = torch.nn.Linear(HIDDEN, size, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight)
    hidden.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        decided = head.evaluate(
            layer,
            hidden,
            targets,
            vocabulary=Vocabulary(start=0, size=size),
            temperature=temperature,
            with_entropy=True,
            output=layer,
        )
    decided.logprobs_N.sum().backward()
    values, grads = exact(hidden, weight, targets, temperature)
    most = 1e-5 if precision == "fp32" else 1e-2
    found = (decided.logprobs_N, decided.entropy_N, hidden.grad, layer.weight.grad)
    names = ("log-probs", "entropies", "gradient of what enters", "gradient of the weight")
    for name, mine, theirs in zip(names, found, (*values, *grads), strict=True):
        error = (mine.detach().double() - theirs).norm() / theirs.norm()
        assert error < most, f"{name}: relative error {error:.1e}, at most {most} is allowed"


def test_a_chunk_takes_the_memory_that_is_planned(cuda):
    size, most = 151_936, head.most_logits(cuda)
    layer = torch.nn.Linear(HIDDEN, size, bias=False, device=cuda, dtype=torch.bfloat16)
    hidden = torch.randn(4 * most // size, HIDDEN, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    settings = {"vocabulary": Vocabulary(start=0, size=size), "temperature": 0.7, "with_entropy": True, "output": layer}
    head.evaluate(layer, hidden, targets, **settings).logprobs_N.sum().backward()
    taken = torch.cuda.max_memory_allocated(cuda) - before
    # And the weight's gradient: a chunk's, and the sum in float32.
    planned = OUTPUT_COPIES * 4 * most + 6 * layer.weight.numel()
    assert taken < 1.1 * planned, f"{taken / 2**30:.2f} GiB, {planned / 2**30:.2f} were planned"
