"""Adapters in any layout: the same learning, the same merged weights, a checkpoint that goes on elsewhere."""

from __future__ import annotations

import functools

import pytest
import torch

from cosmos_core.config.schema import Float8Config, LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.parallel.lora import is_adapter, published_tensors, trained_tensors
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import copy_state, write_checkpoint
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.testing.layouts import make_trainer, train_step, whole, worst_error
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.shards import canonical_tensors, local_shard, local_shards, owned
from tests.families import CONFIGS, TINY, family, text_payloads
from tests.merging import published

STEPS = 3
FAMILIES = {**CONFIGS, "one key head": {**TINY, "model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1}}


def policy(parallel=None, modules=("all-linear",), scaling="none", **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=64,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**{"compile": "off", **(parallel or {})}),
        lora=LoraConfig(rank=4, alpha=16.0, modules=modules),
        float8=Float8Config(scaling=scaling),
    )


TWO = {
    "fsdp": policy(dp_shard=2),
    "tp": policy(tp=2),
    "tp, no sequence parallel": policy(tp=2, parallel={"sequence_parallel": False}),
    "cp": policy(cp=2),
    "pp": policy(pp=2),
    "fsdp, recomputed": policy(dp_shard=2, parallel={"recompute": "full"}),
}
FOUR = {"fsdp tp": policy(dp_shard=2, tp=2), "pp hsdp": policy(pp=2, dp_replicate=2)}


def steps(trainer, numbers):
    for number in numbers:
        train_step(trainer, text_payloads(seed=number))


@torch.no_grad()
def make(name, settings, world):
    """A trainer whose adapters add something from the start, so that A has a gradient, too."""
    trainer = make_trainer(family("hf", FAMILIES[name])(), settings, world)
    for key, parameter in trainer.module.named_parameters():
        if key.endswith("lora_B.weight"):
            share = local_shard(parameter)
            generator = torch.Generator().manual_seed(len(key))
            share.tensor.copy_(torch.randn(share.shape, generator=generator)[share.index] * 0.02)
    return trainer


def learn(name, settings, world):
    """The gradient of a step, what it leads to and what is published of that, whole."""
    trainer = make(name, settings, world)
    steps(trainer, range(1))
    gradients = {key: each.grad for key, each in trainer.module.named_parameters() if each.grad is not None}
    # Together the processes publish every element of every tensor once.
    owned(local_shards(*published_tensors(trainer.module)), world.rank, world.exchange)
    return [whole(each, world) for each in (gradients, trained_tensors(trainer.module), published(trainer.module))]


def learn_in(name, layouts):
    worlds = [(settings, World(form_mesh(settings.mesh, "cpu"))) for settings in layouts]
    return [learn(name, settings, world) for settings, world in worlds]


@functools.cache
def alone(name):
    return learn(name, policy(), single_world())


def compare(name, layouts, processes):
    results = run_world(processes, learn_in, name, list(layouts.values()), timeout_s=240.0)[0]
    for label, found in zip(layouts, results, strict=True):
        for one, expected, limit in zip(found, alone(name), (1e-5, 1e-3, 1e-4), strict=True):
            worst, error = worst_error(one, expected)
            assert error <= limit, (label, worst, error)


def test_two_processes():
    compare("qwen3-tied", TWO, 2)


def test_four_processes():
    compare("qwen3", FOUR, 4)


def test_a_key_head_that_processes_share():
    compare("one key head", {"tp": policy(tp=2)}, 2)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_experts(name):
    compare(name, {"fsdp ep": policy(dp_shard=2, ep=2), "tp": policy(tp=2)}, 2)


def test_only_adapters_learn_and_none_are_published():
    trainer = make_trainer(family("hf", CONFIGS["llama"])(), policy(modules=("q_proj", "down_proj")), single_world())
    before = {name: tensor.clone() for name, tensor in canonical_tensors(trainer.module).items()}
    plain = {name: tensor for name, tensor in before.items() if not is_adapter(name)}
    start = published(trainer.module)
    assert start.keys() == plain.keys()
    assert all(torch.equal(start[name], tensor) for name, tensor in plain.items()), "B starts at zero"
    steps(trainer, range(STEPS))
    after, sent = canonical_tensors(trainer.module), published(trainer.module)
    assert all(torch.equal(after[name], tensor) for name, tensor in plain.items())
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items() if is_adapter(name))
    changed = {name for name, tensor in plain.items() if not torch.equal(sent[name], tensor)}
    assert changed == {name for name in plain if name.split(".")[-2] in {"q_proj", "down_proj"}}
    state = trainer.state()
    assert state
    assert all(is_adapter(name) for name in state), "the model below is not saved"


def test_adapters_beside_products_in_8_bits():
    found, *_ = learn("llama", policy(scaling="rowwise"), single_world())
    expected, *_ = alone("llama")
    assert not torch.equal(*(each["model.layers.0.self_attn.q_proj.lora_B.weight"] for each in (found, expected)))
    flat = [torch.cat([each[name].flatten() for name in sorted(expected)]) for each in (found, expected)]
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.98


def save(name, settings, folder):
    trainer = make(name, settings, World(form_mesh(settings.mesh, "cpu")))
    steps(trainer, range(2))
    place = Place(run_id="test", step=trainer.step, stage=0, nonfinite_steps=0, below=trainer.below)
    return write_checkpoint(folder, copy_state(trainer.state(), place), open_channel())


def test_resumes_elsewhere(tmp_path):
    path = run_world(4, save, "qwen3-tied", policy(pp=2, tp=2), str(tmp_path))[0]
    trainer = make_trainer(family("hf", CONFIGS["qwen3-tied"])(), policy(), single_world())
    restore(trainer, path, lambda index: None)
    steps(trainer, range(2, STEPS))
    uninterrupted = make("qwen3-tied", policy(), single_world())
    steps(uninterrupted, range(STEPS))
    worst, error = worst_error(trained_tensors(trainer.module), trained_tensors(uninterrupted.module))
    assert error <= 1e-3, (worst, error)


def test_adapters_for_other_weights_are_refused(tmp_path):
    path = run_world(2, save, "llama", policy(dp_shard=2), str(tmp_path))[0]
    trainer = make_trainer(family("hf", CONFIGS["llama"])(), policy(), single_world())
    frozen = next(each for each in trainer.module.parameters() if not each.requires_grad)
    with torch.no_grad():
        frozen[0, 0] += 1e-4
    with pytest.raises(
        CheckpointError, match=r"step-2 has adapters for other weights than those of /base: .* there and"
    ):
        restore(trainer, path, lambda index: None, name="/base")


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"policy\.lora\.modules: .*'q_prj'; did you mean q_proj"):
        make("llama", policy(modules=("q_prj",)), single_world())
