import tomllib
from pathlib import Path

from cosmos_core.plugins.known import COMMANDS, KNOWN
from cosmos_core.protocols import KINDS
from cosmos_core.protocols.provider import entry_point_group

PLUGINS = Path(__file__).parents[3] / "plugins"


def test_every_first_party_plugin_and_command_is_known_and_no_other():
    provided, commands = {}, {}
    for file in PLUGINS.glob("*/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        for kind in KINDS:
            for name in project.get("entry-points", {}).get(entry_point_group(kind), {}):
                provided[kind, name] = project["name"]
        added = project.get("entry-points", {}).get("cosmos_core.commands", {})
        commands |= dict.fromkeys(added, project["name"])
    assert provided == KNOWN
    assert commands == COMMANDS


def test_the_extra_all_is_of_every_distribution():
    extras = tomllib.loads((PLUGINS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {tomllib.loads(file.read_text())["project"]["name"] for file in PLUGINS.glob("*/*/pyproject.toml")}
    assert {line.partition(">=")[0] for line in extras["all"]} == named
