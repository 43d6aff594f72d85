"""The estimate against what tiny models really hold: parameters, gradients, optimizer state, what autograd keeps."""

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.config.loading import recipe_from
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, huggingface
from cosmos_core.models.parallel import forwards
from cosmos_core.models.tokens import tokens_payload
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.protocols import ModelContext
from cosmos_core.run.planning.memory import policy_memory
from tests.places import fake_mesh

torch.set_num_threads(1)

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "llama": {"model_type": "llama", **BASE},
    "qwen3": {"model_type": "qwen3", **BASE, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **BASE,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **BASE,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def model_of(name, tmp_path):
    context = ModelContext(path=None, config=CONFIGS[name], assets=tmp_path)
    made = HuggingFaceModel(HuggingFaceOptions(), context)
    made.prepare(["some 1 text", "2 more"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    return made


def recipe(units, **policy):
    return recipe_from(
        {
            "run": {"name": "demo", "steps": 1},
            "model": {"plugin": "hf", "path": "x"},
            "algorithm": {"plugin": "grpo"},
            "dataset": {"plugin": "numbers"},
            "policy": {"optimizer": {"lr": 1e-6}, "micro_batch_units": units, "precision": "fp32", **policy},
        }
    )


def batch_of(model, lengths):
    payloads = [tokens_payload(np.arange(2) + 3, np.arange(length - 1) % 200 + 3) for length in lengths]
    (batch,) = model.pack(payloads, budget=sum(lengths))
    assert batch.num_units == sum(lengths)
    return batch


def storages(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def kept_by(model, module, batch, lengths):
    """Bytes that a forward keeps, without the parameters; and of these, those of the output layer and of scores."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decided = model.decide(module, batch, temperature=1.0)
    own = storages(module.parameters())
    vocabulary = model.config.vocab_size
    sizes = {place: (size, tensor) for place, (size, tensor) in kept.items() if place not in own}
    output = sum(size for size, tensor in sizes.values() if tensor.shape[-1] == vocabulary)
    squares = {(length, length) for length in lengths}
    scores = sum(size for size, tensor in sizes.values() if tuple(tensor.shape[-2:]) in squares)
    return sum(size for size, _ in sizes.values()), output, scores, decided


def test_one_process_holds_what_is_estimated(tmp_path):
    for name in CONFIGS:
        check_estimate(model_of(name, tmp_path))


def check_estimate(model):
    # The model adds up.
    facts = model.facts()
    assert sum(part.count * part.num_parameters for part in facts.parts) == facts.num_parameters
    assert sum(part.count for part in facts.parts if part.is_layer) == facts.num_layers

    # More units keep more and shorter documents the same.
    facts = model.facts()
    short, long = (policy_memory(recipe(units), facts)[0].device["activations"] for units in (100, 300))
    assert long == pytest.approx(3 * short, rel=0.01)

    # A model that says nothing is estimated without activations.
    facts = attrs.evolve(model.facts(), parts=())
    (rank,) = policy_memory(recipe(100), facts)
    assert not rank.is_whole
    assert "activations" not in rank.device
    assert rank.device["parameters"] == 4 * facts.num_parameters
    # Nor one that says nothing of the precision in which it computes.
    known = [attrs.evolve(part, kept={"float32": part.kept["float32"]}) for part in model.facts().parts]
    facts = attrs.evolve(model.facts(), parts=known)
    whole = [policy_memory(recipe(100, precision=each), facts)[0].is_whole for each in ("fp32", "bf16")]
    assert whole == [True, False]
    for precision in ["fp32", "bf16"]:
        lengths = [90, 70, 33, 20, 11]
        made = recipe(sum(lengths), precision=precision)
        (rank,) = policy_memory(made, model.facts())
        assert rank.is_whole
        module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
        batch = batch_of(model, lengths)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            kept, output, scores, decided = kept_by(model, module, batch, lengths)
        decided.logprobs_N.sum().backward()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        optimizer.step()
        parameters = sum(storages(module.parameters()).values())
        gradients = sum(storages(each.grad for each in module.parameters()).values())
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert rank.device["parameters"] == parameters
        assert rank.device["gradients"] == gradients
        assert rank.device["optimizer"] == sum(storages(moments).values())
        if precision == "bf16":
            # In 16 bits the plan counts attention by CUDA's kernel, which keeps no scores as the CPU's does.
            kept -= scores
        casts = rank.device.get("gathered weights", 0)
        assert rank.device["activations"] + casts == pytest.approx(kept - output, rel=0.15)
        # Of the three copies of the output, autograd keeps one.
        assert rank.device["logits"] / 3 == pytest.approx(output, rel=0.15)
        whole = parameters + gradients + sum(storages(moments).values()) + kept + 2 * output
        assert sum(rank.device.values()) == pytest.approx(whole, rel=0.15)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_process_of_tp_keeps_results_of_full_width(monkeypatch, tmp_path, name):
    monkeypatch.setattr(huggingface, "check_tiny_model", lambda *_: None)
    units, model, results = [90, 70, 34, 20, 10], model_of(name, tmp_path), []
    made = [
        recipe(sum(units), mesh={"tp": 2}, parallel={"recompute": each}, device="cpu") for each in ("selective", "full")
    ]
    selective, full = (policy_memory(each, model.facts())[0].device["activations"] for each in made)
    of = forwards._Result.of
    monkeypatch.setattr(forwards._Result, "of", lambda result: results.append(of(result)) or results[-1])
    with fake_mesh(made[0].policy.mesh) as mesh:
        layout = layout_of(made[0].policy, mesh, "cpu")
        module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
        model.decide(module, batch_of(model, units), temperature=1.0)
    kept = storages(value for result in results for value in result.values if isinstance(value, torch.Tensor))
    assert selective - full == pytest.approx(sum(kept.values()), rel=0.05)


def test_numbers_that_make_no_model_are_refused(tmp_path):
    from cosmos_core.errors import ConfigError

    config = {**CONFIGS["qwen3"], "num_key_value_heads": 3}
    made = HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    made.prepare(["some text"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM with this config fails.*num_key_value_heads = 3"):
        made.facts().parts[:]
