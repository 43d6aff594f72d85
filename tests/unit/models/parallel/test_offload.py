"""Offloading activations: the same bits, one copy of each storage, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cosmos_core.models.parallel import offload as module_under_test
from cosmos_core.models.parallel.forwards import recompute_layer
from cosmos_core.models.parallel.offload import offload
from tests.streams import delay_offloading


@pytest.fixture
def copies(monkeypatch):
    """The bytes of each copy, made as late as may be, with every storage worth one; memory for them comes in parts."""
    made = []
    delay_offloading(monkeypatch.setattr)
    inner = module_under_test._copy
    monkeypatch.setattr(module_under_test, "BLOCK_BYTES", 100)
    monkeypatch.setattr(
        module_under_test, "_copy", lambda *pair: (made.append(sum(map(len, pair[0]))), inner(*pair))[1]
    )
    return made


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, hidden, angles):
        return hidden + self.third(torch.sin(self.first(hidden) * angles) * self.second(hidden))


def gradients(*, offloads, recompute="none", autocast=False, trains=True):
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(4)]).requires_grad_(trains)
    for layer in layers:
        recompute_layer(layer, recompute)
    if offloads:
        offload(list(layers))
    embedding, angles = nn.Embedding(5, 8), torch.rand(5, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = embedding(torch.arange(5))
            for layer in layers:
                found = layer(found, angles)
        found.square().sum().backward()
    return [embedding.weight.grad, *(each.grad for each in layers.parameters() if trains)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_are_the_same_bits(copies, recompute, autocast):
    expected = gradients(offloads=False, recompute=recompute, autocast=autocast)
    assert not copies
    found = gradients(offloads=True, recompute=recompute, autocast=autocast)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # Of each layer its entry alone, there and, of the first two of four, back; the last ones are there still.
    if recompute == "full":
        assert copies == [160] * 2 * (4 + 2)


def test_each_storage_is_copied_once_and_weights_are_not(copies):
    """Of hidden states that two products take, angles that all layers share, and what is saved inside."""
    gradients(offloads=True)
    assert len(copies) == 2 * 5 * (4 + 2), "entry, first · angles, its sine, second, and their product"


@pytest.mark.parametrize("trains", [True, False])
def test_casts_of_weights_are_not_copied(copies, trains):
    gradients(offloads=True, autocast=True, trains=trains)
    assert set(copies) <= {2 * 40, 4 * 40}, "of five rows, in bfloat16 and float32"
    # What only looks like one is: weights of a layer are no more than they are.
    layer = nn.Linear(8, 8, bias=False)
    saved = module_under_test._Saved.of(layer, None)
    few = [torch.zeros(8, 8, dtype=torch.bfloat16) for _ in range(2)]
    assert [isinstance(saved.pack(each), torch.Tensor) for each in (few[0].t(), few[0], few[1])] == [True, True, False]


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, hidden_states, other, angles):
        return hidden_states * self.inside(other) * angles, other.sin()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("named", [False, True])
def test_each_stream_is_copied_and_what_layers_share_is_not(copies, named, recompute):
    layers = [TwoStreams() for _ in range(4)]
    for layer in layers:
        recompute_layer(layer, recompute)
    offload(layers)
    hidden, other = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    angles = torch.rand(7, 5, 8)[0]
    for layer in layers:
        given = {"hidden_states": hidden, "other": other, "angles": angles}
        hidden, other = layer(**given) if named else layer(*given.values())
    # The first layer has its second stream of nobody that is known.
    assert len(copies) == 4 + 3 + (recompute == "none") * 4
    hidden.sum().backward()


def test_nothing_is_left(copies):
    layers = [Layer(), Layer()]
    offload(layers)
    seen = []
    inner = module_under_test._Saved.pack

    def pack(self, tensor):
        seen.append(weakref.ref(self))
        return inner(self, tensor)

    module_under_test._Saved.pack = pack
    try:
        hidden = torch.randn(5, 8, requires_grad=True)
        layers[1](layers[0](hidden, torch.rand(5, 8)), torch.rand(5, 8)).sum().backward()
    finally:
        module_under_test._Saved.pack = inner
    gc.collect()
    assert seen
    assert not any(each() for each in seen)


def test_memory_of_what_was_brought_in_vain_is_free_once_the_copy_is_done(copies, monkeypatch):
    """Of a second result that nothing is made of."""

    class Forked(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden).sin(), (hidden * 2).sin()

    ends, inner = [], module_under_test._copy
    monkeypatch.setattr(module_under_test, "_copy", lambda *pair: (ends.append(inner(*pair)), ends[-1])[1])
    layers = [Forked(8, 8) for _ in range(4)]
    offload(layers)
    hidden, others = torch.randn(5, 8, requires_grad=True), []
    for layer in layers:
        hidden, other = layer(hidden)
        others.append(other)
    hidden.sum().backward()
    assert not all(stream.done >= number for stream, number in (end.place for end in ends))
    del hidden, other, others
    gc.collect()
    assert all(stream.done >= number for stream, number in (end.place for end in ends))


def test_a_device_has_one_stream_for_all_copies(monkeypatch):
    """torch hands 32 out in turn: with one for each copy, some are soon those that others wait on."""
    made, device = [], torch.device("cuda", 0)

    def stream(device):
        made.append(SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: "its end"))
        return made[-1]

    cuda = SimpleNamespace(Stream=stream, stream=contextlib.nullcontext, current_stream=lambda device: None)
    monkeypatch.setattr(module_under_test, "cuda", cuda)
    monkeypatch.setattr(module_under_test, "_copy_each", lambda targets, sources: None)
    there = [SimpleNamespace(is_cuda=True, device=device)]
    module_under_test._stream.cache_clear()
    assert [module_under_test._copy(there, there) for _ in range(3)] == ["its end"] * 3
    module_under_test._stream.cache_clear()
    assert len(made) == 1
