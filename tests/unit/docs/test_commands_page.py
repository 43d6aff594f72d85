"""The page of the commands of cosmos-service-tools has each of their options."""

from pathlib import Path

import typer

from cosmos_service_tools.audit import audit
from cosmos_service_tools.chat import chat
from cosmos_service_tools.compare import compare
from cosmos_service_tools.doctor import doctor
from cosmos_service_tools.evaluate import evaluate
from cosmos_service_tools.init import init
from cosmos_service_tools.profile import profile
from cosmos_service_tools.recipes import app
from cosmos_service_tools.samples import samples
from cosmos_service_tools.serve import serve

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "commands.md").read_text()


def test_every_command_and_option_is_on_the_page():
    for command in (init, doctor, audit, compare, samples, profile, evaluate, chat, serve):
        name = command.__name__.replace("evaluate", "eval")
        application = typer.Typer(add_completion=False)
        application.command()(command)
        section = PAGE.partition(f"## `cosmos {name}`")[2].partition("\n## ")[0]
        assert section
        if "[](samples.md) has the options" in section:
            section = (DOCS / "samples.md").read_text()
        options = [option for each in typer.main.get_command(application).params for option in each.opts]
        assert [option for option in options if option.startswith("--") and option not in section] == []
    for command in app.registered_commands:
        assert f"$ cosmos recipes {command.name or command.callback.__name__}" in PAGE
    assert "`--overwrite`" in PAGE
