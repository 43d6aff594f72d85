"""What a process of a recipe at real size holds is what the plan counts; the other recipes' are built in nightly."""

from pathlib import Path

from cosmos_core.config.loading import load_recipe
from cosmos_core.run.planning.plan import make_plan
from tests.places import check_places

RECIPES = Path(__file__).parents[4] / "recipes"


def test_places_of_a_recipe_hold_what_is_planned(tmp_path):
    path = RECIPES / "grpo-qwen3-32b.toml"
    check_places(make_plan(load_recipe(path), path, tmp_path))
