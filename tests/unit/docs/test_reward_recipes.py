"""Every recipe of the pages about rewards is one: its keys, its plugins, their options."""

import re
import tomllib
from pathlib import Path

from cosmos_core.config.checks import check_recipe
from cosmos_core.config.loading import recipe_from
from cosmos_core.plugins.known import KNOWN
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RewardContext

ROOT = Path(__file__).parents[3]
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "docs" / "rewards.md", *sorted((ROOT / "plugins" / "rewards").glob("*/README.md"))]
BLOCKS = [(page, block) for page in PAGES for block in TOML.findall(page.read_text())]
REWARDS = [name for (kind, name), package in KNOWN.items() if kind == "reward" and package.startswith("cosmos-reward-")]


def test_the_pages_have_a_recipe_for_every_reward_that_makes_it():
    text = PAGES[0].read_text()
    for name in REWARDS:
        assert f'plugin = "{name}"' in text
        assert f"| `{name}` | `{KNOWN['reward', name]}` |" in text
    for _, block in BLOCKS:
        recipe = recipe_from(
            {
                "run": {"name": "page", "steps": 1},
                "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
                "algorithm": {"plugin": "grpo"},
                "dataset": {"plugin": "arithmetic"},
                "policy": {"optimizer": {"lr": 1e-6}},
                **tomllib.loads(block),
            }
        )
        check_recipe(recipe)
        plugins = PluginSet.load(("reward", each.plugin) for each in recipe.reward)
        for each in recipe.reward:
            context = RewardContext(name=each.label, seed=0)
            plugins.create("reward", each.plugin, each.options, context, "reward.options")
