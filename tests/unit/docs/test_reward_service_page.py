"""The page of the reward service: its files are served, its recipes run, and every key is in its tables."""

import json
import re
import tomllib
from pathlib import Path

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.config.structure import structure
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RewardContext
from cosmos_service_reward_service.application import ENQUEUE, FETCH
from cosmos_service_reward_service.cosmos_rl import PATHS
from cosmos_service_reward_service.settings import ScorerSettings, ServiceSettings, kinds_of

PAGE = (Path(__file__).parents[3] / "docs" / "reward-service.md").read_text()
BLOCKS = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def test_a_file_is_served_and_a_recipe_makes_its_rewards():
    served = [kinds_of(structure(block, ServiceSettings)) for block in BLOCKS if "scorer" in block]
    assert served == [{"colour": {"media"}, "fits": {"media"}}, {"colour": {"media", "latents"}}]
    for block in BLOCKS:
        for table in block.get("reward", ()):
            reward = structure(table, RewardConfig, "reward")
            plugins = PluginSet.load([("reward", reward.plugin)])
            context = RewardContext(name="page", seed=0)
            plugins.create("reward", reward.plugin, reward.options, context, "reward.options")


def test_every_key_is_in_a_table_with_its_default():
    for cls in [ServiceSettings, ScorerSettings]:
        rows = {}
        for line in PAGE.splitlines():
            found = re.match(r"\| (`\w+`(?:, `\w+`)*) \| .* \|(.*)\|$", line)
            if found:
                names, defaults = (re.findall(r"`(.*?)`", found[number]) for number in (1, 2))
                rows.update(zip(names, defaults or [""] * len(names), strict=True))
        for field in attrs.fields(cls):
            default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default
            assert rows[field.name] == ("" if default in (attrs.NOTHING, None) else json.dumps(default))


def test_the_paths_are_those_that_are_served():
    assert {path for path in (ENQUEUE, FETCH, *PATHS.values()) if path not in PAGE} == set()
