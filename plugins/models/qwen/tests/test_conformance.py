import pytest

from cosmos_core.testing import ModelConformance

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
QWEN3 = {**TINY, "model_type": "qwen3", "tie_word_embeddings": True}
QWEN2 = {**TINY, "model_type": "qwen2", "tie_word_embeddings": False}


class TestQwen3(ModelConformance):
    plugin = "qwen"
    config = QWEN3


@pytest.mark.nightly
class TestQwen2(ModelConformance):
    plugin = "qwen"
    config = QWEN2
