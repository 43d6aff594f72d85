"""Recomputing a layer: the same gradients, and only what was not kept is computed again."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_core.models.parallel.forwards import recompute_layer


class Layer(nn.Module):
    def __init__(self, *, changes_in_place):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.shift = nn.Parameter(torch.ones(8))
        self.changes_in_place = changes_in_place

    def forward(self, hidden):
        hidden = self.first(hidden)
        hidden = hidden.add_(self.shift) if self.changes_in_place else hidden + self.shift
        return self.second(torch.nn.functional.silu(hidden)).tanh()


class Operators(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, _, args=(), kwargs=None):
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def backward(what, *, changes_in_place=False):
    """Gradients of a layer, and what its backward pass computes."""
    torch.manual_seed(0)
    layer = Layer(changes_in_place=changes_in_place)
    recompute_layer(layer, what)
    hidden = torch.randn(5, 8, requires_grad=True)
    loss = layer(hidden).square().sum()
    with Operators() as operators:
        loss.backward()
    return [hidden.grad, *(parameter.grad for parameter in layer.parameters())], operators.counts


def test_gradients_are_the_same_bits(subtests):
    for changes_in_place in [False, True]:
        for what in ["full", "selective"]:
            with subtests.test(changes_in_place=changes_in_place, what=what):
                found, _ = backward(what, changes_in_place=changes_in_place)
                expected, _ = backward("none", changes_in_place=changes_in_place)
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_what_is_computed_again():
    counts = {what: backward(what)[1] for what in ("none", "selective", "full")}
    assert counts["selective"]["mm"] == counts["none"]["mm"] < counts["full"]["mm"]
    assert counts["selective"]["silu"] == counts["full"]["silu"] == counts["none"]["silu"] + 1


def test_a_result_that_the_layer_changed_is_computed_again():
    expected = backward("none", changes_in_place=True)[1]["mm"]
    assert backward("selective", changes_in_place=True)[1]["mm"] == expected + 1
