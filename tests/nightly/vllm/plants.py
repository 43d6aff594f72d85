"""Faults that tests plant in a worker of real vLLM, by `collective_rpc`; each is told the rank that it is for."""

from __future__ import annotations

import torch

from cosmos_engine_vllm import packed

ORIGINAL = packed.pack_again


def spoil_a_slice(worker, rank, name):
    """After an update, one value of a tensor is another one: what holds it is a part of a fused parameter."""
    if worker.rank == rank:
        held, copy = worker._cosmos_held, type(worker._cosmos_held).copy

        def spoiled(pieces):
            copy(held, pieces)
            ((_, view),) = held._live()[name]
            view[-1, -1] += 1

        held.copy = spoiled


def spoil_a_product(worker, rank, layer_name, row):
    """After an update, one row that products are computed with is that of before, while its matrix is right."""

    def spoiled(model):
        ORIGINAL(model)
        if worker.rank != rank:
            return
        layer = model.get_submodule(layer_name)
        weight = layer.weight.data
        right = weight.clone()
        weight[row].zero_()
        packed._pack()(layer, remove_weight=False)
        weight.copy_(right)

    packed.pack_again = spoiled


def packs(worker, layer_name):
    """True if products of a layer are computed with a packed copy of its matrix, as they are on most processors."""
    layer = worker._cosmos_model().get_submodule(layer_name)
    weight = layer.weight.data
    right = weight.clone()
    weight.zero_()
    product = layer.cpu_linear(torch.ones(1, weight.shape[1], dtype=weight.dtype), weight, None)
    weight.copy_(right)
    return bool(product.any())


def mend(worker):
    """All faults are gone."""
    packed.pack_again = ORIGINAL
    vars(worker._cosmos_held).pop("copy", None)
