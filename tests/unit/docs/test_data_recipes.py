"""Recipes of the data page and of the data plugins' own pages are what these plugins take."""

import re
import tomllib
from pathlib import Path

import pytest

from cosmos_core.config.schema import DatasetConfig, RewardConfig
from cosmos_core.config.structure import structure
from cosmos_core.plugins.recipe import named_parts
from cosmos_core.plugins.selection import PluginSet

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "docs" / "data.md",
    *(ROOT / "plugins" / "datasets" / name / "README.md" for name in ("jsonl", "huggingface", "mixture", "curriculum")),
    *(ROOT / "plugins" / kind / "reason" / "README.md" for kind in ("datasets", "rewards")),
]
RECIPES = {
    f"{page.parent.name}-{number}": tomllib.loads(block)
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
}


@pytest.fixture(scope="module")
def plugins():
    return PluginSet()


def check_options(plugins, kind, name, options):
    plugins.include(kind, name)
    structure(options, plugins.provider(kind, name).options, f"{name}.options")
    for part in [*options.get("parts", ()), *([options["part"]] if "part" in options else ())]:
        check_options(plugins, "dataset", part["plugin"], part.get("options", {}))


def test_a_recipe_of_each_page_is_one_that_its_plugins_take(plugins):
    assert {name.rpartition("-")[0] for name in RECIPES} >= {"docs", "jsonl", "huggingface", "mixture"}
    assert len(RECIPES) >= 15
    for recipe in RECIPES.values():
        assert recipe.keys() <= {"dataset", "reward"}
        if "dataset" in recipe:
            dataset = structure(recipe["dataset"], DatasetConfig, "dataset")
            check_options(plugins, "dataset", dataset.plugin, dataset.options)
            assert {name for _, name, *_ in named_parts(dataset.options)} <= {record.name for record in plugins}
        for table in recipe.get("reward", ()):
            reward = structure(table, RewardConfig, "reward")
            check_options(plugins, "reward", reward.plugin, reward.options)
