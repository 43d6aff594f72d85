"""A spread model is checked on a small one of the same make, and refused by all of its processes alike."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.building import verify_tiny
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout, ModelContext
from cosmos_core.testing.worlds import run_world


class Scaled(HuggingFaceModel):
    def logits(self, module, hidden_ND):
        return super().logits(module, hidden_ND) * 1.01


class Mixing(HuggingFaceModel):
    """Lets all documents of a row see one another."""

    def _text_batch(self, tokens_U, lengths):
        return super()._text_batch(tokens_U, [sum(lengths)])


def refusal(make, config, sizes):
    """What a process of a spread model is told."""
    torch.set_num_threads(1)
    model = make(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=Path("/none")))
    layout = Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu"))
    try:
        model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
    except PluginIncompatibleError as error:
        return str(error)
    return None


def test_a_spread_model_is_refused_by_all_processes_alike(subtests, config):
    for make, sizes in [(Scaled, {"dp_shard": 2}), (Mixing, {"pp": 2})]:
        with subtests.test(make=make, sizes=sizes):
            told = run_world(2, refusal, make, config, sizes)
            assert told[0] == told[1]
            assert "packed logits differ from its own forward" in told[0]


def test_a_spread_model_that_packs_is_built(config):
    assert run_world(2, refusal, HuggingFaceModel, config, {"dp_shard": 2}) == [None, None]


LARGE = {
    "qwen3": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288},
    "gpt_oss": {"num_hidden_layers": 24},
    "gemma3_text": {"hidden_size": 3840, "num_attention_heads": 32, "num_key_value_heads": 16, "num_hidden_layers": 48},
    "deepseek_v3": {},
}
DEPTHS = {"qwen3": 1, "gpt_oss": 2, "gemma3_text": 6, "deepseek_v3": 4}
KINDS = {"qwen3": 1, "gpt_oss": 1, "gemma3_text": 1, "deepseek_v3": 2}
"""Of feed-forward blocks."""


def tried(make, config, tmp_path):
    """The small models that a model is checked on."""
    model = make(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    small = []

    def verify(module):
        small.append(module)
        model.verify(module)

    verify_tiny(model._blueprint(seed=0, dtype=torch.bfloat16, device=torch.device("meta")), verify)
    return small


def test_a_large_model_is_checked_on_a_small_one_with_every_kind_of_layer(subtests, tmp_path):
    for number, model_type in enumerate(["gpt_oss", "deepseek_v3"]):
        with subtests.test(model_type=model_type):
            folder = tmp_path / str(number)
            folder.mkdir()
            check_large(folder, model_type)


def check_large(tmp_path, model_type):
    config = {"model_type": model_type, **LARGE[model_type]}
    (small,) = tried(HuggingFaceModel, config, tmp_path)
    assert small.num_parameters() < 30e6
    assert small.config.num_hidden_layers == DEPTHS[model_type]
    assert len({type(layer.mlp) for layer in small.model.layers}) == KINDS[model_type]
    listed = getattr(AutoConfig.for_model(**config), "layer_types", None) or ()
    assert set(getattr(small.config, "layer_types", None) or ()) == set(listed)
    with pytest.raises(PluginIncompatibleError, match="packed logits differ"):
        tried(Scaled, config, tmp_path)


def test_a_model_of_which_no_small_one_can_be_tried_goes_unchecked_and_says_so(tmp_path, config, caplog):
    class Failing(HuggingFaceModel):
        def verify(self, module):
            raise ValueError("its numbers do not fit")

    with caplog.at_level(logging.WARNING):
        assert len(tried(Failing, config, tmp_path)) == 2
    assert "Qwen3ForCausalLM is not compared with transformers' own forward: " in caplog.text
    assert "(its numbers do not fit; its numbers do not fit)" in caplog.text
