from __future__ import annotations

import attrs
import pytest

from cosmos_core.config.fingerprint import difference, facts_of
from cosmos_core.config.loading import recipe_from


@pytest.fixture
def recipe():
    return recipe_from(
        {
            "run": {"name": "demo", "steps": 3},
            "model": {"plugin": "hf", "path": "somewhere"},
            "algorithm": {"plugin": "sft"},
            "policy": {"optimizer": {"lr": 1e-6}},
            "dataset": {"plugin": "arithmetic"},
        }
    )


@pytest.fixture
def facts(recipe):
    return facts_of(recipe, {"model hf": "cosmos-core 1.0", "cosmos-core": "1.0"})


def test_who_is_made_of_the_same_differs_in_nothing(recipe, facts):
    elsewhere = attrs.evolve(
        recipe,
        run=attrs.evolve(recipe.run, output_dir="elsewhere"),
        policy=attrs.evolve(recipe.policy, replicas=7),
        control=attrs.evolve(recipe.control, port=9),
        launch=attrs.evolve(recipe.launch, threads=4),
    )
    assert difference(facts, facts_of(elsewhere, {"model hf": "cosmos-core 1.0", "engine vllm": "v 2"})) == ""


def test_a_key_is_named_with_both_values(recipe, facts):
    other = attrs.evolve(recipe, run=attrs.evolve(recipe.run, seed=recipe.run.seed + 1))
    found = difference(facts, facts_of(other, {}))
    assert found == f"its run.seed is {recipe.run.seed + 1}, and {recipe.run.seed} in this run"


def test_a_plugin_is_named_with_both_versions(recipe, facts):
    found = difference(facts, facts_of(recipe, {"model hf": "cosmos-core 1.1"}))
    assert found == "its plugin model hf is cosmos-core 1.1, and cosmos-core 1.0 in this run"


def test_the_first_of_several_is_named_and_the_others_counted(recipe, facts):
    theirs = dict(facts) | {"run.seed": "99", "plugin cosmos-core": "2.0"}
    del theirs["algorithm.plugin"]
    assert difference(facts, theirs).startswith("its algorithm.plugin is absent, and ")
    assert difference(facts, theirs).endswith("(and 2 more)")
