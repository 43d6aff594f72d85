from types import SimpleNamespace

import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError
from cosmos_core.rollout.generation import LeaseRecipes

RECIPE = recipe_from(
    {
        "run": {"name": "r", "steps": 3},
        "model": {"path": "somewhere"},
        "algorithm": {"plugin": "dapo", "options": {"clip_low": 0.1}},
        "policy": {"optimizer": {"lr": 1e-6}},
        "dataset": {"plugin": "jsonl"},
        "reward": [{"plugin": "math"}],
    }
)
COLD = {"rollout.sampling.temperature": 0.5}


@pytest.fixture
def recipes():
    made = []

    def make(recipe):
        made.append(recipe)
        return SimpleNamespace(options=recipe.algorithm.options)

    found = LeaseRecipes(RECIPE, make)
    found.made = made
    return found


def test_a_lease_goes_by_the_values_that_it_carries(recipes):
    plain, cold = recipes.of({}), recipes.of(COLD)
    other = recipes.of({"algorithm.options.clip_low": 0.3})
    assert [each.recipe.rollout.sampling.temperature for each in (plain, cold, other)] == [1.0, 0.5, 1.0]
    assert [each.algorithm.options["clip_low"] for each in (plain, cold, other)] == [0.1, 0.1, 0.3]
    assert plain.recipe is RECIPE


def test_what_is_known_is_not_made_again_and_what_is_old_is_forgotten(recipes):
    assert recipes.of(COLD) is recipes.of(dict(COLD))
    assert len(recipes.made) == 2
    for number in range(40):
        recipes.of({"policy.optimizer.lr": (number + 1) / 100})
    assert len(recipes._known) == 16
    assert recipes.of({"policy.optimizer.lr": 0.4}) is recipes.of({"policy.optimizer.lr": 0.4})
    assert len(recipes.made) == 42


def test_what_cannot_be_is_told(recipes):
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"):
        recipes.of({"rollout.sampling.temperature": 0})
