"""The command `cosmos launch`: hands a run over to a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.cli.commands import Overrides, RecipeFile, RunName, refuse
from cosmos_core.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    launcher: Annotated[str, typer.Argument(metavar="LAUNCHER", help="Name of a launcher plugin, such as slurm.")],
    recipe: RecipeFile = None,
    *,
    overrides: Overrides = None,
    name: RunName = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Submit the run in this folder again.")
    ] = None,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Print what would be submitted; leave nothing behind.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run of this name, unless it is running.")
    ] = False,
) -> None:
    """Hand a run over to a cluster; what runs where is derived from the same recipe and plan as for `cosmos run`.

    Other options are the launcher's own (`launch.options` in the recipe): --gpus-per-node 8 is
    --set launch.options.gpus_per_node=8. `cosmos plugins show NAME` lists them.

    \b
    Examples:
      cosmos launch slurm recipes/arithmetic.toml --render-only
      cosmos launch slurm recipe.toml --partition h100 --gpus-per-node 8 --time 12:00:00
      cosmos launch slurm --resume /shared/runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart
    if (recipe is None) == (resume is None):
        raise ConfigError("give a recipe, or --resume RUN; see cosmos launch --help")
    from rich.console import Console  # noqa: PLC0415

    from cosmos_service_tools.submission import launch_again, launch_recipe, option_overrides  # noqa: PLC0415

    chosen = [*(overrides or ()), *option_overrides(launcher, context.args)]
    console = Console()
    if resume is not None:
        if name is not None or overwrite:
            raise ConfigError("--resume submits a run as it is; it takes no --name or --overwrite")
        launch_again(resume, launcher, chosen, console, render_only=render_only)
        return
    from cosmos_core.config.loading import load_recipe  # noqa: PLC0415

    named = [f"run.name={json.dumps(name, ensure_ascii=False)}"] if name is not None else []
    selected = f"launch.launcher={json.dumps(launcher)}"
    selection = load_recipe(recipe, overrides=[selected, *chosen, *named], refuse=refuse)
    launch_recipe(selection, recipe, console, render_only=render_only, overwrite=overwrite)
