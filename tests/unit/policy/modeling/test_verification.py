import pytest
import torch

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.policy.modeling import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.protocols import ModelContext


def build(tmp_path, config, cls=HuggingFaceModel):
    model = cls(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path / "assets"))
    return model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))


def test_linear_attention_is_refused(tmp_path, config):
    del config["head_dim"]
    with pytest.raises(PluginIncompatibleError, match="linear_attention layers, which cannot be packed"):
        build(tmp_path, {**config, "model_type": "qwen3_next"})


def test_soft_capped_attention_is_refused(tmp_path, config):
    with pytest.raises(PluginIncompatibleError, match="soft cap"):
        build(tmp_path, {**config, "model_type": "gemma2"})


def test_a_recurrent_model_is_refused(tmp_path):
    config = {"model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    with pytest.raises(PluginIncompatibleError, match=r"differ|cannot"):
        build(tmp_path, {**config, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8})


def test_a_head_of_its_own_is_noticed(tmp_path, config):
    class Wrong(HuggingFaceModel):
        def logits(self, module, hidden_ND):
            return super().logits(module, hidden_ND) * 1.01

    with pytest.raises(PluginIncompatibleError, match="packed logits differ"):
        build(tmp_path, {**config, "initializer_range": 0.3}, Wrong)
