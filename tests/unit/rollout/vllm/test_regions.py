"""Regions of fused, stacked and padded parameters, found by watching a loader like vLLM's; no vLLM is needed."""

import pytest
import torch
from torch import nn

from cosmos_core.errors import EngineError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.vllm.regions import LoadedWeights
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of

TENSORS = {
    "embed": torch.randn(5, 4),
    "q": torch.randn(4, 4),
    "k": torch.randn(2, 4),
    "v": torch.randn(2, 4),
    "gate_up": torch.randn(6, 4),
    "down": torch.randn(4, 3),
    "bias": torch.randn(4),
}
PLACES = {"q": (0, 4), "k": (4, 6), "v": (6, 8)}


def empty(*shape):
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class Fused(nn.Module):
    """Loads as vLLM's models do: rows of one parameter, halves that are swapped, a padded vocabulary."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.gate_up = empty(8, 4), empty(8, 4), empty(6, 4)
        self.down, self.bias = empty(4, 3), empty(4)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in PLACES:
                first, last = PLACES[name]
                self.qkv.data.narrow(0, first, last - first).copy_(tensor)
            elif name == "gate_up":
                self.gate_up.data[3:].copy_(tensor[:3])
                self.gate_up.data[:3].copy_(tensor[3:])
            elif name == "embed":
                self.embed[: tensor.shape[0]].data.copy_(tensor)
            else:
                self.get_parameter(name).data.copy_(tensor)


def load(loaded, tensors, limit=10**9):
    loaded.copy(
        (piece, tensor[slices.within(piece, slices.whole(name, tuple(tensor.shape)))])
        for name, tensor in tensors.items()
        for piece in slices.chunks(slices.whole(name, tuple(tensor.shape)), limit)
    )


@pytest.mark.parametrize("limit", [10**9, 5, 1])
def test_slices_of_any_size_arrive_where_the_loader_puts_whole_tensors(limit):
    expected, model = Fused(), Fused()
    expected.load_weights(TENSORS.items())
    load(LoadedWeights(model, TENSORS), TENSORS, limit)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, atol=0, rtol=0)


def test_the_digest_is_of_the_canonical_tensors_and_of_what_is_there_now():
    model = Fused()
    loaded = LoadedWeights(model, TENSORS)
    load(loaded, TENSORS)
    assert loaded.digest() == digest_of(TENSORS)
    model.qkv.data[7, 3] += 1
    assert loaded.digest() != digest_of(TENSORS)
    model.qkv.data[7, 3] = TENSORS["v"][1, 3]
    assert loaded.digest() == digest_of(TENSORS)
    model.gate_up.data = model.gate_up.data.flip(0)
    assert loaded.digest() != digest_of(TENSORS)


def test_a_slice_across_regions_reaches_both():
    model = Fused()
    loaded = LoadedWeights(model, TENSORS)
    piece = TensorSlice(name="gate_up", start=(2, 1), shape=(2, 2))
    loaded.copy([(piece, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))])
    assert model.gate_up[5].tolist() == [0, 1, 2, 0]
    assert model.gate_up[0].tolist() == [0, 3, 4, 0]
    assert model.gate_up.count_nonzero() == 4


def test_parameters_are_looked_up_once_an_update(monkeypatch):
    model, calls = Fused(), []
    loaded, found = LoadedWeights(model, TENSORS), model.named_parameters
    monkeypatch.setattr(model, "named_parameters", lambda: calls.append(1) or found())
    load(loaded, TENSORS, limit=1)
    assert len(calls) == 1


def test_looking_for_regions_writes_nothing():
    model = Fused()
    LoadedWeights(model, TENSORS)
    assert not any(parameter.any() for parameter in model.parameters())


def test_values_held_in_more_bits_give_the_digest_of_what_was_sent():
    tensors = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    loaded = LoadedWeights(Fused(), tensors)
    load(loaded, tensors)
    assert loaded.digest() == digest_of(tensors)


@pytest.mark.parametrize(
    ("name", "loader", "message"),
    [
        ("partly", lambda model, tensor: model.down.data[:2].copy_(tensor[:2]), "copies 6 of the 12 values"),
        ("changed", lambda model, tensor: model.down.data.copy_(tensor + 1), "no data"),
        ("turned", lambda model, tensor: model.down.data.view(3, 4).copy_(tensor.t()), "turned or folded"),
        ("read", lambda model, tensor: model.down.data.fill_(tensor.sum().item()), "cannot be given 'down' alone"),
        ("twice", lambda model, tensor: [model.down.data[i : i + 2].copy_(tensor[1:3]) for i in (0, 2)], "form of its"),
    ],
)
def test_a_tensor_that_is_held_in_another_form_is_refused(name, loader, message):
    class Odd(Fused):
        def load_weights(self, weights):
            for _, tensor in weights:
                loader(self, tensor)

    with pytest.raises(EngineError, match=message):
        LoadedWeights(Odd(), {"down": TENSORS["down"]})
