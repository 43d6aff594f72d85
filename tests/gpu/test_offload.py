"""Activations that wait in the machine's memory: the same gradients, and less memory of the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cosmos_core.models.parallel.offload import offload

pytestmark = pytest.mark.gpu

LAYERS, ROWS, WIDTH = 12, 8192, 1024


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))


def step(*, offloads):
    """Gradients after three micro-batches, and the most that activations took of the device."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(LAYERS)]).to("cuda", torch.bfloat16)
    if offloads:
        offload(list(layers))
    hidden = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for number in range(3):
        found = hidden
        for layer in layers:
            found = layer(found)
        found.square().mean().backward()
        if number == 0:
            # Gradients are there from now on.
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    return [each.grad for each in layers.parameters()], torch.cuda.max_memory_allocated() - before


def test_the_same_bits_in_the_memory_of_a_few_layers(cuda):
    expected, whole = step(offloads=False)
    found, part = step(offloads=True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # Entry, what GELU is of, and its result, in bfloat16.
    each = 2 * ROWS * 9 * WIDTH
    assert whole >= LAYERS * each
    assert part <= 6 * each, f"{part / each:.1f} layers' activations"
