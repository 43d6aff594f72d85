"""The commands of `cosmos plugins`."""

from __future__ import annotations

import typer

from cosmos_core.cli.plugins.checking import check_plugin
from cosmos_core.cli.plugins.listing import list_plugins
from cosmos_core.cli.plugins.making import new_plugin
from cosmos_core.cli.plugins.showing import show_plugin

app = typer.Typer(no_args_is_help=True, help="List, show, make and check plugins.")
app.command("list")(list_plugins)
app.command("show")(show_plugin)
app.command("new")(new_plugin)
app.command("check")(check_plugin)
