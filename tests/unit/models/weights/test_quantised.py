"""Checkpoints in fp8 and MXFP4 are read as transformers dequantises them, part by part, and exported in bfloat16."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.tokenizer import build_tokenizer
from cosmos_core.models.weights.loading import Stored
from cosmos_core.models.weights.quantised import joined
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout, ModelContext
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.shards import local_shards

torch.set_num_threads(1)

SIZES = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
CONFIGS = {
    "deepseek_v3": SIZES
    | {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_key_value_heads": 4}
    | {"q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": SIZES
    | {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TOKENIZER = {"build": "byte-bpe", "vocab_size": 280, "split_digits": True}
METHODS = {
    "deepseek_v3": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "gpt_oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def blocks_of(weight):
    """Codes and scales of a matrix, one for each 128 x 128 elements, as DeepSeek-V3 has them."""
    rows, columns = weight.shape
    scales = torch.stack(
        [
            torch.stack([block.abs().max() / 448 for block in band.split(128, 1)])
            for band in weight.float().split(128, 0)
        ]
    )
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return (weight.float() / spread).to(torch.float8_e4m3fn), scales


def quantised(tensors, family):
    made, generator = {}, torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, rows = tensor.shape
            shape = (experts, rows, inner // 32)
            made[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            made[f"{name}_scales"] = torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator)
        elif family == "deepseek_v3" and "_proj" in name:
            made[name], made[f"{name}_scale_inv"] = blocks_of(tensor)
        else:
            made[name] = tensor
    return made


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request, tmp_path_factory):
    """A checkpoint as it is published."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **CONFIGS[request.param])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = quantised(load_file(folder / "model.safetensors"), request.param)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": METHODS[request.param]}))
    build_tokenizer(["How many? 12"], TOKENIZER).save_pretrained(folder)
    return folder


def model_of(folder):
    context = ModelContext(path=str(folder), config=None, assets=folder / "nothing-made-locally")
    return HuggingFaceModel(HuggingFaceOptions(), context)


def build(folder, layout=None):
    return model_of(folder).build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)


def test_a_checkpoint_is_read_as_transformers_does_and_exported_in_bfloat16(folder, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    model, module = model_of(folder), build(folder)
    assert not model.facts().absent_weights
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, theirs[name].float()), name
    written = model.export(module, tmp_path / "export")
    assert written[0] == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").state_dict()
    assert all(each.dtype == theirs[name].dtype and torch.equal(each, theirs[name]) for name, each in again.items())


def shares_of(folder, sizes):
    module = build(folder, Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu")))
    return {name: (share.index, share.tensor.clone()) for name, share in local_shards(module.state_dict()).items()}


def test_processes_hold_parts_of_what_one_holds(subtests, folder):
    whole = build(folder).state_dict()
    for sizes in [{"dp_shard": 2}, *([{"tp": 2}] if folder.name.startswith("deepseek") else [])]:
        with subtests.test(sizes=sizes):
            for shares in run_world(2, shares_of, folder, sizes):
                for name, (index, part) in shares.items():
                    assert torch.equal(part, whole[name][index]), name


def matrices():
    """A matrix of each format that fills no last block, what holds it, and its values by other means."""
    generator = torch.Generator().manual_seed(0)
    codes, scales = blocks_of(torch.randn(200, 300, generator=generator))
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    yield {"X": codes, "X_scale_inv": scales}, (codes.float() * spread).bfloat16()
    blocks = torch.randint(256, (3, 40, 4, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(64, 190, (3, 40, 4), dtype=torch.uint8, generator=generator)
    values = convert_moe_packed_tensors(blocks, exponents)
    yield {"X_blocks": blocks, "X_scales": exponents}, values
    # One matrix alone.
    yield {"X_blocks": blocks[1], "X_scales": exponents[1]}, values[1]


def stored_of(tensors):
    dtypes = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.float32: "F32"}
    return {
        name: Stored(name=name, file=Path("file"), shape=tuple(each.shape), dtype=dtypes[each.dtype])
        for name, each in tensors.items()
    }


def test_a_part_is_read_with_the_blocks_or_groups_that_it_touches(subtests):
    for tensors, values in matrices():
        matrix, sizes = joined(stored_of(tensors))["X"], []

        def read(stored, part, *, tensors=tensors, sizes=sizes):
            found = tensors[stored.name][part]
            sizes.append(found.nbytes)
            return found

        *leading, rows, columns = values.shape
        assert matrix.shape == values.shape
        ranges = [[(0, 33), (33, 40), (size // 2, size - 1), (0, size)] for size in (rows, columns)]
        for vertical, horizontal in itertools.product(*ranges):
            with subtests.test(tensors=list(tensors), rows=vertical, columns=horizontal):
                index = (*(slice(1, 3) for _ in leading), slice(*vertical), slice(*horizontal))
                assert torch.equal(matrix.values(read, index), values[index])
        sizes.clear()
        # A scale, and a code or the group that it is in.
        matrix.values(read, tuple(slice(0, 1) for _ in values.shape))
        assert sizes == ([1, 16] if "X_blocks" in tensors else [4, 1])


def test_scales_that_are_missing_or_do_not_fit_are_refused_by_name(subtests, folder, tmp_path):
    kind = "deepseek_v3" if folder.name.startswith("deepseek") else "gpt_oss"
    name, scales, reason = {
        "deepseek_v3": ("mlp.gate_proj.weight", "_scale_inv", r"shape \(3, 2\) and dtype F64 or F32 or F16 or BF16"),
        "gpt_oss": ("mlp.experts.down_proj_blocks", "_scales", r"shape \(4, 64, 3\) and dtype U8"),
    }[kind]
    name = f"model.layers.0.{name}"
    scales = f"{name.removesuffix('_blocks')}{scales}"
    shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    held = tensors.pop(scales)
    for changed, message in [
        ({}, rf"model\.safetensors: {name} is quantised, and the checkpoint lacks its scales, {scales}"),
        ({scales: held[1:].contiguous()}, rf"{scales} has shape .*; the scales of {name}, .* have {reason}"),
        ({scales: held.to(torch.int8)}, rf"{scales} has shape .* and dtype I8; the scales of {name}, .* have {reason}"),
    ]:
        with subtests.test(message=message):
            save_file(tensors | changed, tmp_path / "damaged" / "model.safetensors")
            with pytest.raises(CheckpointError, match=message):
                model_of(tmp_path / "damaged").facts()


def test_other_methods_are_refused(subtests, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    for changes, told in [
        ({"quant_method": "awq"}, r"\(awq\)"),
        ({"quant_method": "fp8", "weight_block_size": None}, r"\(fp8, e4m3, weight_block_size None\)"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"\(fp8, e4m3, weight_block_size \[64, 128\]\)"),
    ]:
        with subtests.test(changes=changes):
            (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "quantization_config": changes}))
            with pytest.raises(ConfigError, match=rf"are quantised {told}, which is not read; mxfp4 is"):
                model_of(tmp_path / "other").facts()
