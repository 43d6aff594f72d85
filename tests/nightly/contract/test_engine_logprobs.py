"""The embedded engine with many architectures: its log-probs are those of a plain forward, or it refuses by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_core.errors import EngineError
from cosmos_core.models import tokens_payload, values
from cosmos_core.protocols import EngineContext, ModelFacts, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions

torch.set_num_threads(1)

CPU = torch.device("cpu")
BASE = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
}
FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "qwen3-windows": {"model_type": "qwen3", "head_dim": 8, **WINDOWS},
    "qwen2": {"model_type": "qwen2"},
    "llama": {"model_type": "llama"},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5},
    "granite-scaled-logits": {"model_type": "granite", "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere-scaled-logits": {"model_type": "cohere", "logit_scale": 0.25},
    "phi3": {"model_type": "phi3"},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gemma2-softcaps": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gpt-oss-sinks": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek-mla": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


class PlainModel:
    """A model plugin's part that the engine needs, without a tokenizer."""

    def __init__(self, config):
        self.config = AutoConfig.for_model(**config)

    def facts(self):
        return ModelFacts(
            architecture="",
            num_parameters=0,
            num_layers=2,
            hidden_size=32,
            vocab_size=80,
            tokenizer_size=80,
            context_length=128,
            stop_ids=frozenset({2}),
            pad_id=0,
        )

    def build(self, *, seed, dtype, device, layout=None):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(self.config, dtype=dtype).to(device).eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "sinks" in name:
                    parameter.normal_()
        return module


def make(model, **overrides):
    settings = {"dtype": torch.float32, "device": CPU, "max_in_flight": 5, "context_length": 100, "seed": 3}
    return EmbeddedEngine(EmbeddedOptions(cache_step=8), EngineContext(model=model, **{**settings, **overrides}))


def plain_logprobs(module, payload):
    prompt, completion = (torch.from_numpy(values(payload, name).copy()).long() for name in ("prompt", "completion"))
    with torch.no_grad():
        logits = module(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
    return logprobs.gather(1, completion[:, None])[:, 0].numpy()


def serve(engine):
    """Complete ragged prompts in batches that mix prefill and decode; returns the payloads."""
    draw = np.random.default_rng(0)
    requests = [
        Request(
            request_id=str(index),
            prompt=tokens_payload(draw.integers(3, 80, size)),
            sampling=Sampling(max_units=4 + 3 * index, num_samples=2),
            seed=index,
        )
        for index, size in enumerate((3, 17, 1, 9, 30))
    ]
    engine.start()
    try:
        handles = engine.submit(requests)
        return [generated.payload for handle in handles for generated in handle.result(30)]
    finally:
        engine.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_plain_forward(family):
    model = PlainModel({**BASE, **FAMILIES[family]})
    payloads = serve(make(model))
    module = model.build(seed=3, dtype=torch.float32, device=CPU)
    module.set_attn_implementation("eager")
    for payload in payloads:
        np.testing.assert_allclose(values(payload, "logprobs"), plain_logprobs(module, payload), atol=2e-5, rtol=0)


REFUSED = {
    "linear attention": (
        {
            "model_type": "qwen3_next",
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        r"layer 0 of Qwen3NextForCausalLM \(linear_attention\)",
    ),
    "a state space": (
        {"model_type": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
        "Mamba2ForCausalLM.forward takes no position_ids",
    ),
    "alibi": ({"model_type": "bloom", "n_head": 4, "n_layer": 2}, "BloomForCausalLM.forward takes no position_ids"),
    "dynamic rope": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope type 'dynamic' changes with the longest sequence",
    ),
    "chunked attention": (
        {
            "model_type": "llama4_text",
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 16,
            "num_local_experts": 2,
            "head_dim": 8,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "layer 0 of Llama4ForCausalLM is of chunked_attention but does not say its width",
    ),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_cannot_be_served_is_refused_at_start_by_name(feature):
    config, message = REFUSED[feature]
    with pytest.raises(EngineError, match=message):
        make(PlainModel({**BASE, **config, "max_position_embeddings": 64})).start()


def test_a_model_that_decodes_otherwise_is_refused(monkeypatch):
    model = PlainModel({**BASE, **FAMILIES["qwen3"]})
    built = model.build(seed=3, dtype=torch.float32, device=CPU)
    attention = type(built.model.layers[0].self_attn)
    forward = attention.forward

    def remembers(self, hidden_states, *args, **kwargs):
        """Looks at the row before, which is another sequence when tokens are packed."""
        shifted = hidden_states + torch.roll(hidden_states, 1, dims=1) * (hidden_states.shape[1] > 1)
        return forward(self, shifted, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", remembers)
    with pytest.raises(EngineError, match="decodes to other log-probs than its own forward"):
        make(model).start()
