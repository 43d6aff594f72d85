"""The built-in `hf` takes any causal language model of transformers: a wide choice of families, each proven."""

import pytest
import torch

from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.protocols import ModelContext
from cosmos_core.testing import ModelConformance
from cosmos_core.testing.conformance.model.decisions import DecisionTests
from cosmos_core.testing.conformance.model.rows import PackingTests
from cosmos_core.testing.conformance.model.weights import WeightTests

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3 with windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "mixture of experts": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "tie_word_embeddings": False,
    },
    "llama": {"model_type": "llama"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 5},
    "granite with scaled logits": {"model_type": "granite", "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere with scaled logits": {"model_type": "cohere", "logit_scale": 0.25},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
}
CONFIGS = {name: {**BASE, **family} for name, family in FAMILIES.items()}


class TestQwen3WithWindows(ModelConformance):
    plugin = "hf"
    config = CONFIGS["qwen3 with windows"]


def only(*parts):
    """Leaves the tests of some parts of the kit to a class, since the rest of the plugin is the same for all."""
    kept = {name for part in parts for name in vars(part)}

    def leave(cls):
        for name in dir(cls):
            if name.startswith("test_") and name not in kept:
                setattr(cls, name, None)
        return cls

    return leave


@only(WeightTests, PackingTests)
class TestCheckpoint(ModelConformance):
    """What depends on where the weights come from."""

    plugin = "hf"

    @pytest.fixture
    def context(self, tmp_path, corpus):
        drawn = ModelContext(path=None, config=CONFIGS["llama"], assets=tmp_path / "assets")
        model = HuggingFaceModel(HuggingFaceOptions(), drawn)
        model.prepare(corpus, self.tokenizer)
        model.export(model.build(seed=3, dtype=torch.float32, device=torch.device("cpu")), tmp_path / "checkpoint")
        return ModelContext(path=str(tmp_path / "checkpoint"), config=None, assets=tmp_path / "nothing")


@only(WeightTests, DecisionTests)
class Evaluated(ModelConformance):
    """What depends on the architecture."""

    plugin = "hf"


class TestQwen2(Evaluated):
    config = CONFIGS["qwen2"]


class TestMixtureOfExperts(Evaluated):
    config = CONFIGS["mixture of experts"]


class TestLlama(Evaluated):
    config = CONFIGS["llama"]


class TestMistralWithWindow(Evaluated):
    config = CONFIGS["mistral with a window"]


class TestGraniteWithScaledLogits(Evaluated):
    config = CONFIGS["granite with scaled logits"]


class TestCohereWithScaledLogits(Evaluated):
    config = CONFIGS["cohere with scaled logits"]


class TestPhi3(Evaluated):
    config = CONFIGS["phi3"]
