from types import SimpleNamespace

import attrs
import pytest
import torch

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import FrozenConfig
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training import setup as making

RECIPE = {
    "run": {"name": "r", "steps": 3},
    "model": {"path": "somewhere"},
    "algorithm": {"plugin": "dpo"},
    "dataset": {"plugin": "jsonl"},
    "policy": {"optimizer": {"lr": 1e-6}, "precision": "fp32", "parallel": {"compile": "off"}, "lora": {"rank": 2}},
}


@pytest.fixture
def layout_of_frozen(monkeypatch, tmp_path, model):
    """Makes a frozen model as if the policy were on a GPU; gives the layout that its weights are built with."""
    layouts = []

    class Here:
        def __getattr__(self, name):
            return getattr(model, name)

        def build(self, *, device, layout, dtype, **arguments):
            layouts.append(attrs.evolve(layout, micro_batch_precision=str(dtype)))
            # As many processes as there are here.
            layout = layout if layout.mesh.world_size > 1 or not several else None
            return model.build(device=torch.device("cpu"), layout=layout, dtype=torch.float32, **arguments)

    several = []
    monkeypatch.setattr(making, "choose_device", lambda key, name: torch.device("cuda"))
    monkeypatch.setattr(making, "load_model", lambda job, plugins, role: Here())

    def make(*, size=1, computes="fp32", **reference):
        several[:] = [size] if size > 1 else []
        policy = {**RECIPE["policy"], "precision": computes}
        job = Job(
            run_id="r",
            directory=tmp_path,
            recipe_directory=tmp_path,
            recipe=recipe_from({**RECIPE, "reference": reference, "policy": policy}),
            num_train_rows=1,
            num_heldout_rows=0,
            num_evaluation_prompts=0,
            uses_rollouts=False,
            stages=(StageFacts(source="preferences"),),
        )
        making.make_frozen(job, "reference", SimpleNamespace(size=size, mesh=single_world().mesh), None)
        return layouts[-1]

    return make


def test_fsdp_keeps_weights_in_the_cpus_memory_where_there_is_any(layout_of_frozen):
    """The module of one process is moved as a whole."""
    assert not layout_of_frozen().cpu_offload
    assert layout_of_frozen(size=2).cpu_offload
    assert not layout_of_frozen(size=2, placement="resident").cpu_offload


def test_weights_are_held_as_the_policy_computes(layout_of_frozen):
    for precision, given, held in [
        ("bf16", {}, "torch.bfloat16"),
        ("bf16", {"precision": "fp32"}, "torch.float32"),
        ("fp32", {}, "torch.float32"),
        ("fp32", {"precision": "bf16"}, "torch.bfloat16"),
    ]:
        assert layout_of_frozen(computes=precision, **given).micro_batch_precision == held
    assert FrozenConfig().held("bf16", on_gpu=False) == "fp32"


def test_only_what_follows_the_policy_has_adapters(layout_of_frozen):
    assert layout_of_frozen().lora is not None
    assert layout_of_frozen(path="elsewhere").lora is None
