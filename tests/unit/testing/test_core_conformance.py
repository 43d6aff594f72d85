"""The core's own plugins keep the promises of their kinds: one class each, without what takes seconds.

Other classes, and the tests that are left out here, are in `tests/nightly/contract`.
"""

from cosmos_core.testing import EngineConformance, LauncherConformance, ModelConformance

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}


class TestHuggingFace(ModelConformance):
    plugin = "hf"
    config = QWEN3
    test_declared_mesh_axes_equal_one_process = None
    test_another_process_encodes_packs_and_builds_the_same = None


class TestEmbedded(EngineConformance):
    plugin = "embedded"


class TestLocal(LauncherConformance):
    plugin = "local"
