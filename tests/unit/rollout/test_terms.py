from types import SimpleNamespace

import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError
from cosmos_core.rollout.terms import LeaseTerms

RECIPE = recipe_from(
    {
        "run": {"name": "r", "steps": 3},
        "model": {"path": "somewhere"},
        "algorithm": {"plugin": "dapo", "options": {"clip_low": 0.1}},
        "dataset": {"plugin": "jsonl"},
        "reward": [{"plugin": "math"}],
    }
)
COLD = {"rollout.sampling.temperature": 0.5}


@pytest.fixture
def terms():
    made = []

    def make(recipe):
        made.append(recipe)
        return SimpleNamespace(options=recipe.algorithm.options)

    found = LeaseTerms(RECIPE, make)
    found.made = made
    return found


def test_a_lease_goes_by_the_values_that_it_carries(terms):
    plain, cold = terms.of({}), terms.of(COLD)
    other = terms.of({"algorithm.options.clip_low": 0.3})
    assert [each.recipe.rollout.sampling.temperature for each in (plain, cold, other)] == [1.0, 0.5, 1.0]
    assert [each.algorithm.options["clip_low"] for each in (plain, cold, other)] == [0.1, 0.1, 0.3]
    assert plain.recipe is RECIPE


def test_what_is_known_is_not_made_again_and_what_is_old_is_forgotten(terms):
    assert terms.of(COLD) is terms.of(dict(COLD))
    assert len(terms.made) == 2
    for number in range(40):
        terms.of({"policy.optimizer.lr": number / 100})
    assert len(terms._known) == 16
    assert terms.of({"policy.optimizer.lr": 0.39}) is terms.of({"policy.optimizer.lr": 0.39})
    assert len(terms.made) == 42


def test_what_cannot_be_is_told(terms):
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"):
        terms.of({"rollout.sampling.temperature": 0})
