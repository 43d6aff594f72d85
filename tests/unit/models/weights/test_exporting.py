"""A spread module is exported as transformers would export it from one process."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import CheckpointError
from cosmos_core.models.building import Blueprint, build_part, build_whole
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.weights import exporting
from cosmos_core.models.weights.exporting import export_adapters, export_parts, group_tensors, same_dtype
from cosmos_core.models.weights.loading import make_shell
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout
from cosmos_core.protocols.layout import Lora
from cosmos_core.testing.worlds import run_world

torch.set_num_threads(1)

SIZES = {"vocab_size": 63, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
FAMILIES = {
    "qwen3": ATTENTION,
    "qwen3_moe": ATTENTION | EXPERTS | {"num_experts": 4},
    "deepseek_v3": ATTENTION
    | EXPERTS
    | LATENT
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}


def config_of(family, is_tied):
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], "tie_word_embeddings": is_tied})


def blueprint(family, is_tied):
    return Blueprint(
        config=config_of(family, is_tied),
        path=None,
        seed=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        auto_class=AutoModelForCausalLM,
        tensor_plan={},
    )


def shell_of(family, is_tied=False):
    return make_shell(config_of(family, is_tied), AutoModelForCausalLM, trust_remote_code=False)


def export(folder, family, is_tied, sizes, dtype=torch.float32):
    part = build_part(blueprint(family, is_tied), Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu")))
    if dtype == torch.float16:
        for parameter in part.parameters():
            parameter.data.mul_(2.0**30)
    shell = shell_of(family, is_tied)
    dtypes = same_dtype(dtype, shell.state_dict(), ())
    return export_parts(part, shell, folder, open_channel(), dtypes=dtypes, file_bytes=6_000)


def test_an_export_is_that_of_one_process(subtests, tmp_path):
    for number, (family, is_tied, sizes, dtype) in enumerate(
        [
            ("qwen3", True, {"pp": 2, "tp": 2}, torch.float32),
            ("qwen3_moe", False, {"dp_shard": 2, "tp": 2, "ep": 4}, torch.bfloat16),
        ]
    ):
        with subtests.test(family=family, is_tied=is_tied, sizes=sizes):
            folder = tmp_path / str(number)
            folder.mkdir()
            check_export(folder, family, is_tied, sizes, dtype)


def check_export(tmp_path, family, is_tied, sizes, dtype):
    size = torch.tensor([number for axis, number in sizes.items() if axis != "ep"]).prod().item()
    said = run_world(size, export, tmp_path / "parts", family, is_tied, sizes, dtype)
    assert said == [[dtype]] * size
    whole = build_whole(blueprint(family, is_tied)).to(dtype)
    whole.save_pretrained(tmp_path / "whole")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in expected.items())
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text()
    module, report = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in whole.state_dict().items())


def export_in_vain(folder, sizes, dtype=torch.float32):
    with pytest.raises(CheckpointError) as caught:
        export(folder, "qwen3", False, sizes, dtype)
    return str(caught.value)


def test_values_beyond_the_dtype_end_the_export_on_every_process(tmp_path):
    told = run_world(2, export_in_vain, tmp_path / "export", {"pp": 2}, torch.float16, timeout_s=30)
    reason = "lm_head.weight has values beyond 65504, the largest of float16; export in another dtype, such as float32"
    assert told == [f"{tmp_path / 'export'} could not be written: {reason}"] * 2


def test_what_cannot_be_written_is_told_to_every_process(tmp_path):
    (tmp_path / "file").touch()
    told = run_world(2, export_in_vain, tmp_path / "file" / "export", {"pp": 2})
    assert told[0] == told[1]
    assert "could not be written: [Errno 20] Not a directory" in told[0]


def fail_of(name):
    """Make converting a tensor back fail, as a bug in transformers would, once tensors have memory."""

    def convert(shell, tensors):
        if name in tensors and not tensors[name].is_meta:
            raise KeyError(name)
        return revert_weight_conversion(shell, tensors)

    exporting.revert_weight_conversion = convert


def export_with_a_bug(folder, sizes, name):
    if dist.get_rank() == 0:
        fail_of(name)
    return export_in_vain(folder, sizes)


def test_a_failing_conversion_ends_the_export_on_every_process(tmp_path):
    check_failing_conversion(tmp_path, {"pp": 2}, "model.layers.1.mlp.up_proj.weight")


def check_failing_conversion(tmp_path, sizes, name):
    told = run_world(math.prod(sizes.values()), export_with_a_bug, tmp_path / "export", sizes, name, timeout_s=30)
    assert set(told) == {f"{tmp_path / 'export'} could not be written: KeyError: '{name}'"}


def export_adapters_of(folder, plan, sizes, module):
    lora = Lora(rank=2, alpha=4.0, modules=(module,))
    part = build_part(plan, Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu"), lora=lora))
    export_adapters(part, folder, open_channel(), below=None)


def export_adapters_in_vain(folder):
    with pytest.raises(CheckpointError) as caught:
        export_adapters_of(folder, blueprint("qwen3", False), {"dp_shard": 2}, "all-linear")
    return str(caught.value)


def test_adapters_that_cannot_be_written_are_told_to_every_process(tmp_path):
    (tmp_path / "file").touch()
    told = run_world(2, export_adapters_in_vain, tmp_path / "file" / "adapter", timeout_s=30)
    assert told[0] == told[1]
    assert "could not be written: [Errno 20] Not a directory" in told[0]


def test_the_first_process_may_hold_no_adapters(tmp_path):
    plan = blueprint("qwen3_moe", False)
    plan.config.mlp_only_layers = [1]
    run_world(2, export_adapters_of, tmp_path, plan, {"pp": 2}, "gate_proj")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert config["target_modules"] == ["model.layers.1.mlp.gate_proj"]


def test_tensors_are_gathered_one_by_one(subtests):
    for family in FAMILIES:
        with subtests.test(family=family):
            module = build_whole(blueprint(family, False))
            shell = shell_of(family)
            groups = group_tensors(lambda held, shell=shell: revert_weight_conversion(shell, held), shell.state_dict())
            assert all(len(names) == 1 for names, _ in groups)
            assert sum(each.nbytes for _, made in groups for each in made.values()) == sum(
                tensor.nbytes for tensor in module.state_dict().values()
            )
