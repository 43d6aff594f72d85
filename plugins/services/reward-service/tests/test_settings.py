"""The file of a service, and what it serves."""

import sys

import pytest

from cosmos_core.errors import ConfigError, PluginError
from cosmos_service_reward_service.settings import kinds_of, load_settings, unknown_scorers

PLUGIN = """
from cosmos_core.protocols import Provider, RewardCapabilities, hookimpl

class Sees:
    def __init__(self, options, context):
        pass

    def load(self):
        raise AssertionError("it is loaded in workers alone")

    def score(self, completion):
        return 0.0

@hookimpl
def cosmos_reward():
    return Provider(create=Sees, capabilities=RewardCapabilities(payload_kinds=frozenset({"media", "tokens"})))
"""
SEES = '[[scorer]]\nplugin = "sees"\n'


@pytest.fixture
def kinds(tmp_path, monkeypatch):
    info = tmp_path / "sees_reward-1.0.dist-info"
    info.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: sees-reward", "Version: 1.0", "Requires-Dist: cosmos-core>=0.1", "")
    (info / "METADATA").write_text("\n".join(lines))
    (info / "entry_points.txt").write_text("[cosmos_core.rewards]\nsees = sees_plugin\n")
    (tmp_path / "sees_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sees_plugin", raising=False)

    def of(text, **overrides):
        path = tmp_path / "rewards.toml"
        path.write_text(text)
        return kinds_of(load_settings(path, overrides))

    return of


def test_scorers_have_names_and_the_kinds_that_requests_can_bring(kinds):
    assert kinds(SEES + '[[scorer]]\nplugin = "sees"\nname = "again"\n', port=1) == {
        "sees": {"media"},
        "again": {"media"},
    }


def test_a_file_that_cannot_be_served_is_refused(kinds, subtests):
    for text, message in [
        ("", "scorer: required, but not given"),
        ("scorer = []", "scorer: "),
        ('[[scorer]]\nplugin = "seez"\n', "no reward plugin named 'seez' is installed"),
        ('[[scorer]]\nplugin = "math"\n', "scorer.0.plugin: 'math' scores tokens, and requests bring latents or media"),
        (SEES + SEES, "sees is there twice; give them names"),
        (SEES + "options = { scale = 2 }\n", "scorer.0.options.scale: unknown option"),
        (SEES + "timeout_s = 0\n", "scorer.0.timeout_s: "),
        ("prot = 1\n" + SEES, "prot: unknown option; did you mean port?"),
        ("port = 65536\n" + SEES, "port: "),
        ("queue_mb = 1\n" + SEES, "queue_mb: 1 is less than body_mb, 512"),
        ("[scorer]\n", "scorer: expected an array"),
    ]:
        with subtests.test(text=text, message=message):
            with pytest.raises((ConfigError, PluginError)) as found:
                kinds(text)
            assert message in str(found.value)


def test_a_file_that_is_not_there_is_no_recipe(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match=r"nope\.toml: no such configuration of a reward service$"):
        load_settings(tmp_path / "nope.toml")
    (tmp_path / "rewards.toml").touch()
    with pytest.raises(ConfigError, match=r"service; did you mean .*/rewards\.toml\?$"):
        load_settings(tmp_path / "rewrds.toml")


def test_a_scorer_that_is_not_there_is_named_with_those_that_are():
    kinds = {"colour": frozenset({"media"}), "motion": frozenset({"media", "latents"})}
    assert unknown_scorers(("colour", "motion"), kinds, "media") == ""
    assert unknown_scorers(("color",), kinds, "media") == (
        "scorers: 'color' is none of this service; did you mean colour? it has colour, motion"
    )
    assert unknown_scorers(("x",), kinds, "media") == "scorers: 'x' is none of this service; it has colour, motion"
    assert unknown_scorers(("motion", "colour"), kinds, "latents") == (
        "scorers: 'colour' scores media, and the request brings latents; serve it by the reward 'decoded' "
        "(cosmos-reward-vision), which decodes latents"
    )
