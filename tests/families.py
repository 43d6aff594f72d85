"""Tiny models of each family, and sequences to train them on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.models import tokens_payload
from cosmos_core.protocols import ModelContext
from cosmos_core.testing.layouts import PluginModel
from cosmos_core.types import Payload

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **TINY,
    **EXPERTS,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "tie_word_embeddings": False,
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {**TINY, "model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {**TINY, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {**TINY, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
    "qwen3-tied": {**TINY, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "llama-uneven": {**TINY, "model_type": "llama", "tie_word_embeddings": False, "vocab_size": 251},
    "qwen3-uneven-tied": {
        **TINY,
        "model_type": "qwen3",
        "head_dim": 8,
        "tie_word_embeddings": True,
        "vocab_size": 251,
    },
    "qwen3-moe": {
        **TINY,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-half-dense": {**DEEPSEEK, "first_k_dense_replace": 2},
}


def family(plugin: str, config: Mapping[str, Any]) -> PluginModel:
    """A family's model."""
    return PluginModel(
        plugin=plugin, context=ModelContext(path=None, config=config, assets=Path("/nothing-made-locally"))
    )


def text_payloads(*, seed: int = 0, number: int = 6, vocabulary: int = 240) -> list[Payload]:
    """Ragged sequences."""
    draw = np.random.default_rng(seed)
    sizes = [(int(draw.integers(1, 20)), int(draw.integers(1, 40))) for _ in range(number)]
    return [
        tokens_payload(draw.integers(0, vocabulary, prompt), draw.integers(0, vocabulary, completion))
        for prompt, completion in sizes
    ]
