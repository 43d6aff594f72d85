"""The estimate of each process against what processes of a mesh really hold."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from cosmos_core.config.loading import recipe_from
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.head import vocabulary_of
from cosmos_core.models.tokens import tokens_payload
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import ModelContext
from cosmos_core.run.planning.memory import policy_memory
from cosmos_core.testing.worlds import run_world

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "vocab_size": 320,
}
CONFIGS = {
    "qwen3": {"model_type": "qwen3", **BASE, "tie_word_embeddings": True},
    "qwen3-uneven": {"model_type": "qwen3", **BASE, "tie_word_embeddings": False, "vocab_size": 319},
    "qwen3-uneven-tied": {"model_type": "qwen3", **BASE, "tie_word_embeddings": True, "vocab_size": 319},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **BASE,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
}
LENGTHS = (42, 35, 21)
UNITS = sum(LENGTHS)


def recipe(mesh, parallel):
    policy = {
        "optimizer": {"lr": 1e-6},
        "micro_batch_units": UNITS,
        "precision": "fp32",
        "mesh": mesh,
        "parallel": parallel,
    }
    return recipe_from(
        {
            "run": {"name": "demo", "steps": 1},
            "model": {"plugin": "hf", "path": "x"},
            "algorithm": {"plugin": "grpo"},
            "dataset": {"plugin": "numbers"},
            "policy": policy,
        }
    )


def model_of(name, assets):
    return HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=None, config=CONFIGS[name], assets=assets))


def part_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(name, assets, mesh, parallel):
    """Bytes of this process's parameters, and of what a forward keeps besides weights and the output layer's."""
    made = recipe(mesh, parallel)
    model = model_of(name, assets)
    layout = layout_of(made.policy, form_mesh(made.policy.mesh, "cpu"), "cpu")
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
    held = sum(part_of(each).numel() for each in module.parameters())
    payloads = [tokens_payload(np.arange(2) + 3, np.arange(length - 1) % 200 + 3) for length in LENGTHS]
    (batch,) = model.pack(payloads, budget=UNITS, multiple=layout.mesh.size("cp") * layout.mesh.size("tp"))
    kept = {}

    # Gathered or local weights pass through the forward too, and parts of whole ones.
    own = {part_of(each).untyped_storage().data_ptr() for each in module.parameters()}
    shapes = {tuple(sorted(part_of(each).shape)) for each in module.parameters()}
    shapes |= {tuple(sorted(each.shape)) for each in module.parameters()}

    def keep(tensor):
        if tuple(sorted(tensor.shape)) not in shapes and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.decide(module, batch, temperature=1.0)
    outputs = {(model.config.vocab_size,), (vocabulary_of(module).size,)}
    return 4 * held, sum(size for size, tensor in kept.values() if tensor.shape[-1:] not in outputs)


@pytest.mark.parametrize(
    ("name", "mesh", "parallel"),
    [
        ("qwen3", {"dp_shard": 2}, {}),
        ("qwen3", {"tp": 2}, {}),
        ("qwen3", {"tp": 2}, {"sequence_parallel": False}),
        ("qwen3", {"cp": 2}, {}),
        ("qwen3-uneven", {"tp": 2}, {}),
        ("qwen3-uneven-tied", {"tp": 2}, {}),
        ("qwen3-uneven-tied", {"dp_shard": 2, "tp": 2}, {}),
        ("qwen3", {"tp": 4}, {}),
        ("qwen3-moe", {"dp_shard": 2, "ep": 2}, {}),
    ],
)
def test_each_process_holds_what_is_estimated(name, mesh, parallel, tmp_path):
    model = model_of(name, tmp_path)
    model.prepare(["some 1 text", "2 more"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    (rank,) = policy_memory(recipe(mesh, parallel), model.facts())
    found = run_world(rank.count, measure, name, tmp_path, mesh, parallel)
    # Experts are not chosen evenly; the estimate is of processes that get even shares.
    parameters, kept = (sum(values) / len(values) for values in zip(*found, strict=True))
    assert rank.device["parameters"] == pytest.approx(parameters, rel=0.02)
    assert rank.device["activations"] == pytest.approx(kept, rel=0.15)
