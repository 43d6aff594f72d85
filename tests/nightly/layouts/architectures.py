"""Causal language models of transformers, each as a tiny config that builds on a CPU in a blink.

Widths divide by 2 and by 4, so that every axis can split them; weights are large, so that mistakes show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SIZES: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
BASE: Final[Mapping[str, Any]] = {
    **SIZES,
    "vocab_size": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALL_HEADS: Final = {"num_key_value_heads": 4}
NO_SUCH_KEY: Final = None
"""In place of a value: a key of `BASE` that a config does not know."""
EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS: Final = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def without(*keys: str) -> dict[str, None]:
    """Keys of `BASE` that a config does not know."""
    return dict.fromkeys(keys, NO_SUCH_KEY)


ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "ministral": {**WINDOWS, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "gemma3_text": {**WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "phi": ALL_HEADS,
    "phi3": {},
    "gpt2": {**without("intermediate_size", "num_key_value_heads"), "tie_word_embeddings": True},
    "gpt_neox": without("num_key_value_heads"),
    "olmo": ALL_HEADS,
    "olmo2": {},
    "olmo3": WINDOWS,
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2": {**WINDOWS, "head_dim": 8, "logit_scale": 0.5, "tie_word_embeddings": True},
    "starcoder2": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "exaone4": {**WINDOWS, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **ALL_HEADS,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "nanochat": {},
    "vaultgemma": {"head_dim": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gemma3n_text": {
        "head_dim": 8,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": WINDOWS["layer_types"],
    },
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    # With smaller weights the gradients of its lambdas, which it computes in float32, nearly cancel over the documents.
    "diffllama": {"initializer_range": 0.4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {
        **without("num_attention_heads"),
        "kv_channels": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        **EXPERTS,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "mamba": {
        **without("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "intermediate_size"),
        "state_size": 8,
        "time_step_rank": 4,
    },
    "falcon": without("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
    "gptj": {
        **without(*SIZES),
        "n_embd": 32,
        "n_inner": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "rotary_dim": 4,
    },
    "mpt": {**without(*SIZES), "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128},
    "stablelm": {},
}
"""By name, which is the `model_type` where no other is given: what its config has besides, or instead of, `BASE`."""


def keys_of(name: str, **changes: Any) -> dict[str, Any]:
    """The tiny config of an architecture, as `[model.config]` of a recipe would have it.

    Args:
        name: A key of `ARCHITECTURES`.
        changes: Of this config, such as `num_hidden_layers`.
    """
    keys = {**BASE, "model_type": name, **ARCHITECTURES[name], **changes}
    return {key: value for key, value in keys.items() if value is not NO_SUCH_KEY}
