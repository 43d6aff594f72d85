from cosmos_core.testing import ModelConformance

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}


class TestLlama(ModelConformance):
    plugin = "llama"
    config = TINY
