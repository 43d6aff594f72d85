"""Rewards say what they lack on this machine, before any process starts."""

import types

import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError, PluginBrokenError
from cosmos_core.run.planning import preflight as absence
from cosmos_core.run.planning.preflight import absent_of_rewards


class Keyed:
    def __init__(self, told):
        self.told = told

    def absent(self):
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


@pytest.fixture
def ask(monkeypatch):
    def asked(*rewards, submits=False):
        monkeypatch.setattr(absence, "capabilities_of", lambda *_: types.SimpleNamespace(submits=submits))
        recipe = {
            "run": {"name": "demo", "steps": 6},
            "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
            "algorithm": {"plugin": "grpo"},
            "policy": {"optimizer": {"lr": 1e-6}},
            "dataset": {"plugin": "numbers"},
            "reward": [
                {"plugin": "keyed", "name": f"r{index}", "options": {"key": "K"}} for index in range(len(rewards))
            ],
        }
        return absent_of_rewards(recipe_from(recipe), None, rewards)

    return asked


def test_each_says_what_it_lacks_under_its_own_name_or_option(ask):
    # Each says what it lacks under its own name.
    assert ask(Keyed(""), object(), Keyed("no key")) == ("reward r2: no key",)

    # An option is named by its path.
    assert ask(Keyed(""), Keyed("key: K is not set")) == ("reward.1.options.key: K is not set",)

    # What other machines lack is not known here.
    assert ask(Keyed("no key"), submits=True) == ()


def test_what_a_plugin_says_wrongly_is_told(ask):
    # Another answer is a fault of the plugin.
    for told, message in [
        (None, r"reward plugin 'keyed': absent\(\) returned None, which is no str"),
        (KeyError("KEY"), r"reward plugin 'keyed': absent\(\) failed: KeyError: 'KEY'"),
    ]:
        with pytest.raises(PluginBrokenError, match=message):
            ask(Keyed(told))

    # What a plugin says itself is passed on.
    with pytest.raises(ConfigError, match=r"^KEY_FILE: no such file$"):
        ask(Keyed(ConfigError("KEY_FILE: no such file")))
