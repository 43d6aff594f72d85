"""Tiny models of each family, and demonstrations to evaluate."""

import numpy as np
import pytest
import torch

from cosmos_core.models import tokens_payload
from cosmos_core.protocols import ModelContext
from cosmos_model_moe import DeepseekModel, MixtureOptions, MoonlightModel, QwenMoeModel

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LATENT = {
    **TINY,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
}
FAMILIES = {
    "qwen3-moe": (
        QwenMoeModel,
        {**TINY, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "norm_topk_prob": True},
    ),
    "deepseek": (DeepseekModel, {**LATENT, "q_lora_rank": 12, "n_group": 2, "topk_group": 1}),
    "moonlight": (
        MoonlightModel,
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    ),
}


@pytest.fixture
def configs():
    """The config of each family, by its plugin."""
    return {family: config for family, (_, config) in FAMILIES.items()}


@pytest.fixture
def make(tmp_path):
    """A model of a family with options; the folder of each config is made once."""
    configs = []

    def made(family, changes=None, **options):
        kind, config = FAMILIES[family]
        changed = {**config, **(changes or {})}
        if changed not in configs:
            configs.append(changed)
        context = ModelContext(path=None, config=changed, assets=tmp_path / f"{family}-{configs.index(changed)}")
        model = kind(MixtureOptions(**options), context)
        if not context.assets.exists():
            model.prepare(["How many? 3+4=7"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
        return model

    return made


@pytest.fixture
def build():
    def built(model):
        return model.build(seed=5, dtype=torch.float32, device=torch.device("cpu"))

    return built


@pytest.fixture
def payloads():
    draw = np.random.default_rng(1)
    lengths = ((4, 6), (2, 9), (5, 1), (3, 3))
    return [tokens_payload(draw.integers(3, 250, p).tolist(), draw.integers(3, 250, n).tolist()) for p, n in lengths]
