import pytest

from cosmos_core.testing import ModelConformance

pytestmark = pytest.mark.nightly

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA_3 = {
    **TINY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LLAMA_2 = {**TINY, "num_key_value_heads": 4, "tie_word_embeddings": False}


class TestLlama(ModelConformance):
    plugin = "llama"
    config = LLAMA_3


class TestLlama2(ModelConformance):
    plugin = "llama2"
    config = LLAMA_2
