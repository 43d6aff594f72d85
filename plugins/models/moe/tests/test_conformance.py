import pytest

from cosmos_core.testing import ModelConformance

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
QWEN3_MOE = {**TINY, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "norm_topk_prob": True}
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
DEEPSEEK = {**LATENT, "q_lora_rank": 12, "n_group": 2, "topk_group": 1}
MOONLIGHT = {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}


class TestQwen3Moe(ModelConformance):
    plugin = "qwen3-moe"
    config = QWEN3_MOE


class TestDeepseek(ModelConformance):
    plugin = "deepseek"
    config = DEEPSEEK


class TestMoonlight(ModelConformance):
    """With an option for which the model counts."""

    plugin = "moonlight"
    config = MOONLIGHT

    @pytest.fixture
    def options(self):
        return {"bias_rate": 0.001}
