"""Every recipe at real size can be planned from its config alone: no weights, no network, no GPU."""

import pytest

from cosmos_core.config.loading import load_recipe, recipe_from
from cosmos_core.run.planning.footprint import memory_by_pool, size
from cosmos_core.run.planning.plan import make_plan
from tests import machines
from tests.unit.run.planning import test_recipes as language
from tests.unit.run.planning import test_world_recipes as world

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
"""Of Qwen3-0.6B."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("planning asked the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("name", language.SIZES)
def test_recipes_of_a_language_model_can_be_planned(tmp_path, name):
    for kind in ("grpo", "sft"):
        language.check(kind, name, tmp_path)


def test_each_machine_holds_the_recipes_that_the_guide_has_for_it(tmp_path):
    (shown,) = machines.PLACE.findall(machines.PAGE.read_text())
    assert shown.splitlines() == list(machines.table(tmp_path)), "if it shall be so: python -m tests.machines"


def test_the_guide_tells_what_a_small_model_takes_of_one_gpu(tmp_path):
    page = machines.PAGE.read_text()
    told = [row.split("|")[-3:-1] for row in page.splitlines() if row.startswith("|") and row.endswith("GiB |")]
    recipe = {
        "run": {"name": "guide", "steps": 1},
        "model": {"plugin": "qwen", "config": SMALL, "tokenizer": {"build": "byte-bpe"}},
        "algorithm": {"plugin": "grpo"},
        "dataset": {"plugin": "arithmetic"},
        "reward": [{"plugin": "math"}],
        "policy": {"optimizer": {"lr": 1e-6}},
        "rollout": {"sampling": {"max_units": 512}},
    }
    full = {"parallel": {"recompute": "full"}}
    for number, changes in enumerate(({}, full, {**full, "lora": {}})):
        changed = recipe_from({**recipe, "policy": {**recipe["policy"], **changes}})
        pools = memory_by_pool(make_plan(changed, None, tmp_path / str(number)))
        assert [size(sum(rank.device.values())) for (rank,) in pools.values()] == [
            each.strip() for each in told[number]
        ]


@pytest.mark.parametrize("name", world.REAL)
def test_a_recipe_of_a_world_model_can_be_planned(tmp_path, name):
    world.check(name, tmp_path)


@pytest.mark.parametrize("name", world.TINY)
def test_a_tiny_recipe_can_be_planned(tmp_path, name):
    recipe, plan = world.planned(name, tmp_path)
    assert plan.parts.facts.num_parameters < 100_000
    assert plan.job.uses_rollouts == bool(recipe.reward)
    assert plan.job.num_evaluation_prompts


def test_both_stages_of_reasoning_can_be_planned(tmp_path):
    folder = language.RECIPES / "reason"
    assert {path.name for path in folder.glob("*.toml")} == {"cosmos-reason1-7b.toml", "reason-tiny.toml"}
    plan = language.planned(folder / "cosmos-reason1-7b.toml", "grpo", "qwen2.5-vl-7b", tmp_path)
    tiny = make_plan(load_recipe(folder / "reason-tiny.toml"), folder / "reason-tiny.toml", tmp_path)
    for each in (plan, tiny):
        assert [stage.source for stage in each.job.stages] == ["demonstrations", "rollouts"]
        assert each.parts.measured.num_demonstrations == each.parts.measured.num_rows
        assert each.parts.measured.num_unusable == 0, "the rewards take what is imitated for unusable"
    assert tiny.parts.facts.num_parameters < 400_000
