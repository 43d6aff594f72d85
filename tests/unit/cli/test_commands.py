"""Commands that distributions add to `cosmos`."""

import re

import pytest
from typer.testing import CliRunner

from cosmos_core.cli.application import app
from cosmos_core.errors import PluginError

GREETER = "[cosmos_core.commands]\ngreet = greets:greet\n"
GREETS = "def greet(name: str) -> None:\n    '''Greet somebody.'''\n    print('hello', name)\n"


@pytest.fixture
def cosmos():
    def run(*arguments):
        return CliRunner().invoke(app, arguments, prog_name="cosmos")

    return run


def test_commands_of_distributions_are_listed_and_run(make_distribution, cosmos, monkeypatch):
    # A command of a distribution is listed and runs.
    make_distribution(
        "greeter", entries="[cosmos_core.commands]\ngreet = greets:greet\n", modules={"greets.py": GREETS}
    )
    assert "Greet somebody." in cosmos("--help").output
    assert cosmos("greet", "Ann").output == "hello Ann\n"
    assert "name <str>" in cosmos("greet", "--help").output

    # Without plugins only the core has commands.
    make_distribution(
        "greeter", entries="[cosmos_core.commands]\ngreet = greets:greet\n", modules={"greets.py": GREETS}
    )
    monkeypatch.setenv("COSMOS_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert "greet" not in cosmos("--help").output

    # One that is known to come with a distribution says with which, whatever follows it.
    known = {"eval": "cosmos-service-tools", "check": "cosmos-service-check", "plugins new": "cosmos-service-check"}
    for command, package in known.items():
        with pytest.raises(PluginError, match=rf"^cosmos {command} comes with .*: pip install {package}$"):
            raise cosmos(*command.split(), "runs/x", "--by", "labels").exception
    assert "No such command 'great'" in cosmos("great").output
    assert "generate, chat, doctor and others: pip install cosmos-service-tools (unless" in cosmos("--help").output

    # One of a distribution is told to who mistypes it, and the variable to those who have set it.
    monkeypatch.delenv("COSMOS_DISABLE_PLUGIN_AUTOLOAD")
    assert "No such command 'great'. Did you mean 'greet'?" in cosmos("great").output
    monkeypatch.setattr("cosmos_core.cli.commands.installed_commands", dict)
    assert "No such command 'recipe'. Did you mean 'recipes'?" in cosmos("recipe", "list").output
    with pytest.raises(PluginError, match=r"comes with another distribution: pip"):
        raise cosmos("chat").exception
    assert "generate, chat, doctor and others: pip install cosmos-service-tools\n" in cosmos("--help").output


def test_a_command_may_be_added_below_plugins(make_distribution, cosmos):
    entries = "[cosmos_core.commands]\nplugins.greet = greets:greet\nplugins.list = greets:greet\n"
    make_distribution("greeter", entries=entries, modules={"greets.py": GREETS})
    assert cosmos("plugins", "greet", "Ann").output == "hello Ann\n"
    assert re.search(r"  greet +Greet somebody\.", cosmos("plugins", "--help").output)
    assert "--debug" in cosmos("plugins", "greet", "--help").output
    assert "greet" not in cosmos("--help").output
    for dotted in ("plugins.greet", "plugins.new"):
        assert f"No such command '{dotted}'" in cosmos(dotted, "Ann").output
    # The core's own names are kept.
    assert "KIND" in cosmos("plugins", "list").output


def test_the_core_keeps_its_commands_and_two_rivals_are_refused(make_distribution, cosmos):
    for name in ("one", "two"):
        make_distribution(name, entries="[cosmos_core.commands]\nversion = nowhere:x\ngreet = nowhere:x\n")
    assert cosmos("version").exit_code == 0
    error = cosmos("greet").exception
    assert isinstance(error, PluginError)
    assert str(error) in (
        "cosmos greet: provided by one and by two; uninstall one of them",
        "cosmos greet: provided by two and by one; uninstall one of them",
    )


def test_a_broken_command_says_what_is_broken_and_hides_no_other(make_distribution, cosmos):
    make_distribution("broken", entries="[cosmos_core.commands]\ngreet = nowhere_at_all:greet\n")
    with pytest.raises(
        PluginError, match=r"nowhere_at_all:greet of the distribution broken cannot be imported: ModuleN"
    ):
        raise cosmos("greet").exception
    shown = cosmos("--help")
    assert shown.exit_code == 0
    assert "run " in shown.output
    assert "the distribution broken" in shown.output
