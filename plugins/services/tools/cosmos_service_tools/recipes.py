"""The command `cosmos recipes`: lists, shows and copies the recipes that ship with cosmos-core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that `cosmos recipes list` prints.")]


@app.callback()
def _root() -> None:
    """List, show and copy the recipes that ship with cosmos-core.

    \b
    A recipe to start from:
      cosmos recipes copy grpo-qwen3-8b my.toml
      cosmos plan my.toml
    """  # noqa: D301 - the escape keeps the lines after it apart


@app.command("list")
def list_recipes() -> None:
    """List them: what each trains, the processors that it is made for, and the plugins that are missing here."""
    from cosmos_core.plugins.discovery import discover  # noqa: PLC0415
    from cosmos_service_tools.missing import missing_from  # noqa: PLC0415
    from cosmos_service_tools.shipped import shipped  # noqa: PLC0415

    records = discover()
    for recipe in shipped():
        typer.echo(f"{recipe.name}{f'  ({recipe.hardware})' if recipe.hardware else ''}\n    {recipe.title}")
        if missing := missing_from(recipe.load(), records).words:
            typer.echo(f"    missing here: {missing}")


@app.command()
def show(name: Name) -> None:
    """Print a recipe."""
    from cosmos_service_tools.shipped import find  # noqa: PLC0415

    typer.echo(find(name).text, nl=False)


@app.command()
def copy(
    name: Name,
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help="The copy, a .toml file; NAME.toml in this folder if absent."),
    ] = None,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there and differ.")] = False,
) -> None:
    """Copy a recipe, and beside it the files that it refers to, so that the copy plans.

    Paths in the copy are those of the copied files.

    \b
    Examples:
      cosmos recipes copy arithmetic
      cosmos recipes copy wfm/wan2.1-1.3b-grpo videos/wan.toml
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.copies import copy_recipe  # noqa: PLC0415
    from cosmos_service_tools.shipped import find  # noqa: PLC0415

    recipe = find(name)
    target = path or Path(f"{Path(recipe.name).name}.toml")
    was_there = target.exists()
    copied = copy_recipe(recipe, target, overwrite=overwrite)
    beside = f", and beside it what it refers to ({len(copied)})" if copied else ""
    done = f"{target} is there already, as cosmos-core has it" if was_there and not overwrite else ""
    typer.echo(f"{done or f'Copied {recipe.name} to {target}'}{beside}. Next: cosmos plan {target}")
