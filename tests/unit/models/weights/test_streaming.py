"""Checkpoints that cannot be this model's are refused by their headers, and values that are none when they are read."""

import re

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import CheckpointError, PluginIncompatibleError
from cosmos_core.models.building import Blueprint, build_part, build_whole
from cosmos_core.models.weights.loading import make_shell
from cosmos_core.models.weights.streaming import Streamed, folder_of, materialise
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout
from cosmos_core.testing.worlds import run_world

torch.set_num_threads(1)

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
KEY = "model.layers.1.mlp.up_proj.weight"


def config_of(family="qwen3", **changes):
    return AutoConfig.for_model(family, **SIZES | (ATTENTION if family == "qwen3" else LATENT) | changes)


def look_through(folder, config):
    return Streamed(str(folder), make_shell(config, AutoModelForCausalLM, trust_remote_code=False))


def blueprint(folder):
    return Blueprint(
        config=config_of(),
        path=str(folder),
        seed=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        auto_class=AutoModelForCausalLM,
        tensor_plan={},
    )


@pytest.fixture
def folder(tmp_path):
    AutoModelForCausalLM.from_config(config_of()).save_pretrained(tmp_path)
    return tmp_path


def change(folder, made):
    """Put tensors, made of those that are there, into a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **made(tensors)}, file, metadata={"format": "pt"})


def test_weights_that_are_no_floats_are_refused_with_their_dtype(subtests, folder):
    for dtype in [torch.int64, torch.bool, torch.int16, torch.complex64]:
        with subtests.test(dtype=dtype):
            change(folder, lambda tensors, dtype=dtype: {KEY: tensors[KEY].to(dtype)})
            with pytest.raises(
                CheckpointError, match=rf"model\.safetensors: {re.escape(KEY)} has dtype [A-Z]+\d*, and"
            ):
                look_through(folder, config_of())


def test_floats_of_any_width_are_taken(subtests, folder):
    for dtype in [torch.float64, torch.float16, torch.bfloat16]:
        with subtests.test(dtype=dtype):
            change(folder, lambda tensors, to=dtype: {name: each.to(to) for name, each in tensors.items()})
            look_through(folder, config_of())


def test_a_checkpoint_of_more_layers_is_refused(folder):
    with pytest.raises(
        CheckpointError, match=r"holds model\.layers\.1\.\S+, and Qwen3ForCausalLM has 1 model\.layers; is the config"
    ):
        look_through(folder, config_of(num_hidden_layers=1, layer_types=["full_attention"]))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    AutoModelForCausalLM.from_config(config_of("deepseek_v3", num_hidden_layers=3)).save_pretrained(tmp_path)
    look_through(tmp_path, config_of("deepseek_v3", num_nextn_predict_layers=1))
    with pytest.raises(CheckpointError, match=r"has 2 model\.layers"):
        look_through(tmp_path, config_of("deepseek_v3", num_nextn_predict_layers=0))


def test_tensors_of_no_layer_that_the_model_has_no_use_for_are_left_out(folder):
    names = ("score.weight", "model.layers.0.rotary.freq")
    change(folder, lambda tensors: {name: tensors[KEY].clone() for name in names})
    look_through(folder, config_of())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_weights_in_another_format_are_refused_and_named(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"has its weights in {re.escape(name)}, .* convert them to safetensors"):
        look_through(folder, config_of())


def test_of_a_checkpoint_on_the_hub_only_its_top_is_fetched(monkeypatch):
    files = ["config.json", "model-00001-of-00002.safetensors", "original/model.safetensors", "original/dtypes.json"]

    def fetch(path, *, revision, **patterns):
        return "-".join(filter_repo_objects(files, **patterns))

    monkeypatch.setattr("cosmos_core.models.weights.streaming.snapshot_download", fetch)
    assert str(folder_of("openai/gpt-oss-20b")) == "-".join(files[:2])


def spoil(value):
    def made(tensors):
        tensors[KEY].view(-1)[5] = value
        return {KEY: tensors[KEY]}

    return made


def build(folder, sizes):
    layout = Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu")) if sizes else None
    with pytest.raises(CheckpointError) as caught:
        build_whole(blueprint(folder)) if layout is None else build_part(blueprint(folder), layout)
    return str(caught.value)


def test_values_that_are_no_numbers_are_refused_when_they_are_read(subtests, folder):
    for value in [float("nan"), float("inf")]:
        with subtests.test(value=value):
            change(folder, spoil(value))
            look_through(folder, config_of())
            assert f"1 of the 512 values read of {KEY} are not finite" in build(folder, {})
            assert (
                f"1 of the 512 values read of {KEY} are not finite" in run_world(1, build, folder, {"dp_shard": 1})[0]
            )


CPU = torch.device("cpu")


def tied_shell():
    config = AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, tie_word_embeddings=True
    )
    return make_shell(config, AutoModelForCausalLM, trust_remote_code=False)


def test_a_tied_parameter_stays_one():
    module = tied_shell()
    materialise([module], device=CPU)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_a_buffer_that_only_a_constructor_computes_is_refused():
    module = tied_shell()
    module.model.norm.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(PluginIncompatibleError, match=r"the buffer model\.norm\.scale is in no checkpoint"):
        materialise([module], device=CPU)
