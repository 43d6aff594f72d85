"""Every layout against one process: the same loss, norm and gradients.

One world of each size takes all its layouts, one after another, so that processes start once.
"""

from __future__ import annotations

import functools

import pytest

from cosmos_core.config.schema import LoraConfig, MeshConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from cosmos_core.models import head
from cosmos_core.testing.layouts import step_alone, steps_in_layouts, worst_error
from tests.families import CONFIGS, family, text_payloads
from tests.streams import delay_offloading

BUDGET = 64


def policy(parallel=None, optimizer="adamw", lora=None, **mesh):
    return PolicyConfig(
        lora=lora,
        precision="fp32",
        micro_batch_units=BUDGET,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
        optimizer=OptimizerConfig(kind=optimizer),
    )


AXES = {
    "fsdp": policy(dp_shard=2),
    "ddp": policy(dp_replicate=2),
    "tp": policy(tp=2),
    "cp": policy(cp=2),
    "pp": policy(pp=2),
}
WAYS = {
    "tp, no sequence parallel": policy(tp=2, parallel={"sequence_parallel": False}),
    "cp by gathering": policy(cp=2, parallel={"context": "gather"}),
    "cp in a ring": policy(cp=2, parallel={"context": "ring"}),
    "pp interleaved": policy(pp=2, parallel={"schedule": "interleaved"}),
    "pp zero-bubble": policy(pp=2, parallel={"schedule": "zero-bubble"}),
    "fsdp, recomputed, offloaded": policy(dp_shard=2, parallel={"recompute": "full", "offload_activations": True}),
    "tp, offloaded": policy(tp=2, parallel={"offload_activations": True}),
    "tp, recomputed in part": policy(tp=2, parallel={"recompute": "selective"}),
}
FOUR = {
    "fsdp tp": policy(dp_shard=2, tp=2),
    "hsdp": policy(dp_replicate=2, dp_shard=2),
    "cp tp": policy(cp=2, tp=2),
    "pp cp": policy(pp=2, cp=2),
    "pp tp, interleaved": policy(pp=2, tp=2, parallel={"schedule": "interleaved"}),
    "pp fsdp, zero-bubble": policy(pp=2, dp_shard=2, parallel={"schedule": "zero-bubble", "offload_activations": True}),
}
TENSOR = {
    "fsdp tp": policy(dp_shard=2, tp=2),
    "pp tp": policy(pp=2, tp=2),
    "tp": policy(tp=4),
}
LORA = {
    "tp, offloaded": policy(tp=2, lora=LoraConfig(rank=4), parallel={"offload_activations": True}),
    "fsdp, offloaded": policy(dp_shard=2, lora=LoraConfig(rank=4), parallel={"offload_activations": True}),
}
EIGHT = {
    "pp fsdp tp": policy(pp=2, dp_shard=2, tp=2),
    "fsdp cp tp, recomputed": policy(dp_shard=2, cp=2, tp=2, parallel={"recompute": "full"}),
    "pp hsdp": policy(pp=2, dp_replicate=2, dp_shard=2),
    "pp cp tp, zero-bubble": policy(pp=2, cp=2, tp=2, parallel={"schedule": "zero-bubble"}),
}
EXPERTS_TWO = {
    **AXES,
    "ep": policy(dp_shard=2, ep=2),
    "ep over tp": policy(tp=2, ep=2),
    "ep, offloaded": policy(dp_shard=2, ep=2, parallel={"offload_activations": True}),
    "ep, recomputed in part": policy(dp_shard=2, ep=2, parallel={"recompute": "selective"}),
}
EXPERTS_FOUR = {
    "fsdp tp ep": policy(dp_shard=2, tp=2, ep=4),
    "fsdp cp ep": policy(dp_shard=2, cp=2, ep=2),
    "pp fsdp ep": policy(pp=2, dp_shard=2, ep=2),
    "hsdp ep": policy(dp_replicate=2, dp_shard=2, ep=2),
}
DENSE_STAGE = {
    "pp fsdp ep": policy(pp=2, dp_shard=2, ep=2),
    "pp tp ep, interleaved": policy(pp=2, tp=2, ep=2, parallel={"schedule": "interleaved"}),
}
EXPERTS_EIGHT = {
    "fsdp cp tp ep": policy(dp_shard=2, cp=2, tp=2, ep=4),
    "pp fsdp cp ep": policy(pp=2, dp_shard=2, cp=2, ep=4),
    "pp fsdp tp ep, recomputed": policy(pp=2, dp_shard=2, tp=2, ep=4, parallel={"recompute": "full"}),
}


@functools.cache
def alone(name, lora=None):
    return step_alone(family("hf", CONFIGS[name]), text_payloads(), policy(lora=lora))


def in_chunks(make):
    """The model, whose output layer takes few decisions at once; what it offloads is copied as late as may be."""
    head.CHUNK_ELEMENTS["cpu"] = 1 << 11
    delay_offloading()
    return make()


def compare(name, layouts, processes, lora=None):
    make = functools.partial(in_chunks, family("hf", CONFIGS[name]))
    found = steps_in_layouts(make, text_payloads(), list(layouts.values()), processes=processes)
    expected = alone(name, lora)
    for label, stepped in zip(layouts, found, strict=True):
        assert abs(stepped.loss - expected.loss) <= 1e-6 * abs(expected.loss), (label, stepped.loss, expected.loss)
        assert abs(stepped.norm - expected.norm) <= 1e-5 * expected.norm, (label, stepped.norm, expected.norm)
        worst, error = worst_error(stepped.gradients, expected.gradients)
        assert error <= 1e-5, (label, worst, error)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_each_axis_of_two(name):
    compare(name, AXES, 2)


def test_each_way_of_an_axis():
    compare("qwen3", WAYS, 2)


def test_offloading_of_layers_that_are_frozen():
    compare("qwen3", LORA, 2, LoraConfig(rank=4))


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_four_processes(name):
    compare(name, FOUR, 4)


@pytest.mark.parametrize("name", ["llama-uneven", "qwen3-uneven-tied"])
def test_a_vocabulary_that_tp_does_not_divide(name):
    compare(name, TENSOR, 4)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_eight_processes(name):
    compare(name, EIGHT, 8)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize(("layouts", "processes"), [(EXPERTS_TWO, 2), (EXPERTS_FOUR, 4), (EXPERTS_EIGHT, 8)])
def test_experts(name, layouts, processes):
    compare(name, layouts, processes)


def test_a_stage_without_experts():
    compare("deepseek-v3-half-dense", DENSE_STAGE, 4)
