"""A part of a model has, bit by bit, the weights that one process has."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import CheckpointError, PluginIncompatibleError
from cosmos_core.models.building import Blueprint, build_part, build_whole
from cosmos_core.models.weights.loading import make_shell
from cosmos_core.models.weights.streaming import Streamed
from cosmos_core.policy.mesh.mesh import DeviceMeshes, form_mesh
from cosmos_core.protocols import Layout
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.shards import local_shards

torch.set_num_threads(1)

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen3": ATTENTION,
    "llama": ATTENTION | {"rope_parameters": SCALED | {"original_max_position_embeddings": 64}},
    "gemma3_text": ATTENTION,
    "qwen3_moe": ATTENTION | EXPERTS | {"num_experts": 4},
    "deepseek_v3": EXPERTS
    | LATENT
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
}


def config_of(family, **changes):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return AutoConfig.for_model(family, **{**sizes, **FAMILIES[family], **changes})


def blueprint(config, path=None):
    return Blueprint(
        config=config,
        path=path,
        seed=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        auto_class=AutoModelForCausalLM,
        tensor_plan={},
    )


def checkpoint(folder, family, **changes):
    """A checkpoint in several files, of values that no initialisation gives; its model."""
    module = build_whole(blueprint(config_of(family, **changes)))
    generator = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    module.save_pretrained(folder, max_shard_size="8KB")
    return module


def part_equals_whole(family, changes, path, sizes):
    config = config_of(family, **changes)
    # What is read is what transformers itself reads.
    whole = build_whole(blueprint(config)) if path is None else AutoModelForCausalLM.from_pretrained(path)
    part = build_part(blueprint(config, path), Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu")))
    # A tied tensor stays one parameter, also before FSDP has put its shards anywhere.
    assert dict(part.named_parameters()).keys() <= dict(whole.named_parameters()).keys()
    tensors = {**dict(whole.named_buffers()), **whole.state_dict()}
    for name, share in local_shards(dict(part.named_buffers()) | part.state_dict()).items():
        assert torch.equal(share.tensor, tensors[name][share.index]), name
    numel = sum(share.tensor.numel() for share in local_shards(dict(part.named_parameters())).values())
    return sorted(part.state_dict()), numel


def test_a_part_is_loaded_with_what_the_whole_has(subtests, tmp_path):
    for number, (family, sizes, is_tied) in enumerate(
        [
            ("qwen3", {"pp": 2, "dp_shard": 2}, True),
            ("gemma3_text", {"dp_shard": 2}, True),
            ("deepseek_v3", {"dp_shard": 2, "tp": 2, "ep": 4}, False),
        ]
    ):
        with subtests.test(family=family, sizes=sizes, is_tied=is_tied):
            folder = tmp_path / str(number)
            folder.mkdir()
            check_loaded(folder, family, sizes, is_tied)


def check_loaded(tmp_path, family, sizes, is_tied):
    changes = {"tie_word_embeddings": is_tied}
    whole = checkpoint(tmp_path, family, **changes)
    size = torch.tensor(list({**sizes, "ep": 1}.values())).prod().item()
    found = run_world(size, part_equals_whole, family, changes, str(tmp_path), sizes)
    names = {name for part, _ in found for name in part}
    assert names | {"lm_head.weight"} == whole.state_dict().keys() | {"lm_head.weight"}
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(numel for _, numel in found) <= 1.5 * count * (2 if sizes.get("tp") else 1)


def test_a_part_of_an_uneven_vocabulary_is_loaded_with_what_the_whole_has(subtests, tmp_path):
    for number, is_tied in enumerate([True, False]):
        with subtests.test(is_tied=is_tied):
            folder = tmp_path / str(number)
            folder.mkdir()
            changes = {"tie_word_embeddings": is_tied, "vocab_size": 63}
            checkpoint(folder, "qwen3", **changes)
            run_world(4, part_equals_whole, "qwen3", changes, str(folder), {"dp_shard": 2, "tp": 2})


def test_a_part_is_drawn_as_the_whole_is(subtests):
    for sizes in [{"pp": 2}, {"tp": 2}]:
        with subtests.test(sizes=sizes):
            run_world(2, part_equals_whole, "qwen3", {"tie_word_embeddings": True}, None, sizes)


def test_a_model_without_experts_is_not_spread_over_them():
    mesh = DeviceMeshes(MeshConfig(dp_shard=2, ep=2), 0)
    with pytest.raises(
        PluginIncompatibleError, match=r"LlamaForCausalLM has no experts module .* policy\.mesh\.ep = 1"
    ):
        build_part(blueprint(config_of("llama")), Layout(mesh=mesh))


def rss_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


BIG = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 16000}


def growth(path, sizes):
    config = AutoConfig.for_model("qwen3", **ATTENTION | BIG)
    layout = Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu"))
    # What is imported and registered once is not counted.
    build_part(blueprint(config_of("qwen3")), layout)
    dist.barrier()
    before = rss_bytes()
    part = build_part(blueprint(config, path), layout)
    peak = rss_bytes() - before
    return peak, sum(share.tensor.nbytes for share in local_shards(dict(part.named_parameters())).values())


def test_loading_takes_the_memory_of_the_share(tmp_path):
    check_memory(tmp_path, {"pp": 2, "dp_shard": 2})


def check_memory(tmp_path, sizes):
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **ATTENTION | BIG))
    module = shell.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.zero_()
    module.save_pretrained(tmp_path, max_shard_size="40MB")
    total = sum(parameter.nbytes for parameter in module.parameters())
    largest = max(parameter.nbytes for parameter in module.parameters())
    for peak, share in run_world(4, growth, str(tmp_path), sizes):
        assert share < 0.4 * total
        assert peak < share + largest, f"{peak / 2**20:.0f} MiB for {share / 2**20:.0f} of {total / 2**20:.0f} MiB"


def look_through(path, family="qwen3", **changes):
    return Streamed(str(path), make_shell(config_of(family, **changes), AutoModelForCausalLM, trust_remote_code=False))


def missing_file(folder):
    (folder / "model-00002-of-00004.safetensors").unlink()
    return r"model-00002-of-00004\.safetensors is missing; .* holds \d+ of 25 tensors"


def truncated_file(folder):
    file = folder / "model-00001-of-00004.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    return rf"model-00001-of-00004\.safetensors is truncated or no safetensors file, with {size - 100:,} bytes"


def truncated_header(folder):
    file = folder / "model-00001-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    return r"model-00001-of-00004\.safetensors is truncated or no safetensors file, with 50 bytes"


def missing_tensor(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return r"lacks 1 of the 25 tensors of Qwen3ForCausalLM, the first is model\.layers\.1\.mlp\.up_proj\.weight"


def lying_index(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00004.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return r"model-00002-of-00004\.safetensors lacks the tensor model\.norm\.weight"


def nothing(folder):
    shutil.rmtree(folder)
    Path(folder).mkdir()
    return r"a config but no weights \(model\.safetensors or model\.safetensors\.index\.json\)"


def test_a_damaged_checkpoint_is_refused_before_anything_is_read(subtests, tmp_path):
    for number, damage in enumerate(
        [missing_file, truncated_file, truncated_header, missing_tensor, lying_index, nothing]
    ):
        with subtests.test(damage=damage):
            folder = tmp_path / str(number)
            folder.mkdir()
            checkpoint(folder, "qwen3", tie_word_embeddings=False)
            look_through(folder, tie_word_embeddings=False)
            message = damage(folder)
            with pytest.raises(CheckpointError, match=message):
                look_through(folder, tie_word_embeddings=False)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(CheckpointError, match=r"lacks \d+ of the \d+ tensors of Qwen3ForCausalLM"):
        look_through(tmp_path)
    with pytest.raises(CheckpointError, match=r"has shape \(\d+,.* and Qwen3MoeForCausalLM needs \("):
        look_through(tmp_path, "qwen3_moe", head_dim=2)
