"""Every pipeline place of every recipe at real size can be built, and holds what the plan counts."""

import pytest

from cosmos_core.config.loading import load_recipe
from cosmos_core.run.planning.plan import make_plan
from tests.places import check_places
from tests.unit.run.planning.test_places import RECIPES

# One process has all of the model.
REAL = sorted(
    path for path in RECIPES.rglob("*.toml") if all(each in path.read_text() for each in ("configs/", "[policy.mesh]"))
)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_places_of_a_recipe_hold_what_is_planned(tmp_path, path):
    check_places(make_plan(load_recipe(path), path, tmp_path))
