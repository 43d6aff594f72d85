"""Every recipe at real size can be planned from its config alone: no weights, no network, no GPU."""

import pytest

from tests.unit.run.planning import test_recipes as language
from tests.unit.run.planning import test_world_recipes as world


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


@pytest.mark.parametrize("name", world.REAL)
def test_a_recipe_of_a_world_model_can_be_planned(tmp_path, name):
    world.check(name, tmp_path)


@pytest.mark.parametrize("name", world.TINY)
def test_a_tiny_recipe_can_be_planned(tmp_path, name):
    recipe, plan = world.planned(name, tmp_path)
    assert plan.parts.facts.num_parameters < 100_000
    assert plan.job.uses_rollouts == bool(recipe.reward)
    assert plan.job.num_evaluation_prompts
