"""Every TOML block of the page about world models, and of its algorithms' own pages, is part of a recipe."""

import re
import tomllib
from pathlib import Path

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.structure import structure
from cosmos_core.plugins.recipe import selections
from cosmos_core.plugins.selection import PluginSet

ROOT = Path(__file__).parents[3]
ALGORITHMS = ("flow-grpo", "ddrl", "diffusion-nft")
PAGES = [
    ROOT / "docs" / "world.md",
    *(ROOT / "plugins" / "algorithms" / name / "README.md" for name in ALGORITHMS),
]
BLOCKS = {
    f"{page.parent.name}-{number}": tomllib.loads(block)
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
}
REST = {
    "run": {"name": "page", "steps": 1},
    "algorithm": {"plugin": "sft"},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "world-mock"},
}


def test_every_recipe_that_the_page_names_is_there():
    text = PAGES[0].read_text()
    named = set(re.findall(r"`([\w.-]+\.toml)`", text)) | set(re.findall(r"recipes/wfm/([\w.-]+\.toml)", text))
    there = {path.name for path in (ROOT / "recipes" / "wfm").glob("*.toml")}
    assert len(named) > 8
    assert named <= there


def test_a_block_of_each_page_is_what_its_plugins_take():
    assert {name.rpartition("-")[0] for name in BLOCKS} == {"docs", *ALGORITHMS}
    for block in BLOCKS.values():
        model = {"plugin": "wan", **block.get("model", {})}
        policy = {**REST["policy"], **block.get("policy", {})}
        model = model if "path" in model else {**model, "config": {}}
        recipe = recipe_from({**REST, **block, "policy": policy, "model": model})
        plugins = PluginSet.load(selections(recipe, ("model", "algorithm", "reward", "dataset", "engine")))
        tables = [
            ("model", recipe.model.plugin, recipe.model.options),
            ("algorithm", recipe.algorithm.plugin, recipe.algorithm.options),
            ("engine", recipe.rollout.engine.plugin, recipe.rollout.engine.options),
            *(("dataset", recipe.dataset.plugin, recipe.dataset.options) for _ in range("dataset" in block)),
            *(("reward", reward.plugin, reward.options) for reward in recipe.reward),
        ]
        for kind, name, options in tables:
            structure(options, plugins.provider(kind, name).options, f"{kind}.options")
