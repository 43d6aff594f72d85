"""The application `cosmos`, its errors, and the commands that run things. `main` imports and calls it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, NoReturn

import typer

from cosmos_core.cli import plugins, runs
from cosmos_core.cli.commands import CommandGroup, Overrides, RecipeFile, RunName, is_debugging, refuse
from cosmos_core.errors import CheckpointError, ConfigError, CosmosError, DataError, PluginError, StorageError
from cosmos_core.observe.output import console

if TYPE_CHECKING:
    from cosmos_core.config.schema import Recipe

_EXIT_CODES: Final = {"finished": 0, "stopped": 130, "failed": 1}

ModelName = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Model plugin.")]
AlgorithmName = Annotated[str | None, typer.Option("--algorithm", metavar="NAME", help="Algorithm plugin.")]
DatasetName = Annotated[str | None, typer.Option("--dataset", metavar="NAME", help="Dataset plugin.")]
EnvironmentName = Annotated[str | None, typer.Option("--environment", metavar="NAME", help="Environment plugin.")]
RewardName = Annotated[str | None, typer.Option("--reward", metavar="NAME", help="Reward plugin.")]
ResumedRun = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with the run in this folder; --set may change length, layout, tracking, launch, a reward's file.",
    ),
]
StartStep = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="step-N|previous",
        help="With --resume: the checkpoint to go on from, if not the newest; what came after it is undone.",
    ),
]


def _root() -> None:
    """Post-train language, vision-language and world models with plugins, asynchronously.

    \b
    A first run, and what to do with its model:
      cosmos run recipes/arithmetic.toml
      cosmos export runs/arithmetic
      cosmos generate runs/arithmetic/export -e "Ann has 7 cards, buys 5 more, then loses 4. How many cards now?\\n"
    """  # noqa: D301 - the escape keeps the lines after it apart


def run(
    recipe: RecipeFile = None,
    *,
    model: ModelName = None,
    algorithm: AlgorithmName = None,
    dataset: DatasetName = None,
    reward: RewardName = None,
    environment: EnvironmentName = None,
    overrides: Overrides = None,
    name: RunName = None,
    resume: ResumedRun = None,
    start: StartStep = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan, like `cosmos plan`.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run of this name.")] = False,
) -> None:
    """Train: make a run from a recipe, or go on with one.

    Ctrl-C stops the run at the next step boundary, with a checkpoint; a second Ctrl-C kills it.

    \b
    Examples:
      cosmos run recipes/arithmetic.toml
      cosmos run recipes/arithmetic.toml --name wide --set rollout.replicas=2 --set policy.optimizer.lr=1e-4
      cosmos run --model qwen --algorithm grpo --dataset jsonl --reward math --set model.path=Qwen/Qwen3-0.6B ...
      cosmos run --resume runs/arithmetic
      cosmos run --resume runs/arithmetic --set run.steps=400
      cosmos run --resume runs/arithmetic --from previous

    \b
    Exit codes:
      0    finished
      1    the run failed, or what it needs did: memory, a port, a process
      2    refused: the recipe, a plugin or the command is wrong
      3    refused: data, a model, a checkpoint or a store cannot be used
      130  stopped by Ctrl-C
    """  # noqa: D301 - the escape keeps the lines after it apart
    if resume is not None:
        if any([recipe, model, algorithm, dataset, reward, environment, name, dry_run, overwrite]):
            hint = " (a mended file: --set reward.N.plugin=FILE.py:NAME)" if reward else ""
            raise ConfigError(f"--resume goes on with the run's own recipe; it takes --set{hint} and --from only")
        from cosmos_core.run.command import resume_run  # noqa: PLC0415

        raise typer.Exit(_EXIT_CODES[resume_run(resume, console(), overrides=overrides or (), start=start)])
    if start is not None:
        raise ConfigError(f"--from {start}: says where a run goes on, and no run is given; add --resume RUN")
    chosen = _load(recipe, (model, algorithm, dataset, reward, environment), overrides, name)
    if dry_run:
        _plan(chosen, recipe)
        return
    from cosmos_core.run.command import run_recipe  # noqa: PLC0415

    raise typer.Exit(_EXIT_CODES[run_recipe(chosen, recipe, console(), overwrite=overwrite)])


def plan(
    recipe: RecipeFile = None,
    *,
    model: ModelName = None,
    algorithm: AlgorithmName = None,
    dataset: DatasetName = None,
    reward: RewardName = None,
    environment: EnvironmentName = None,
    overrides: Overrides = None,
    name: RunName = None,
) -> None:
    """Check everything about a run without starting it, and print what would run and what it needs.

    \b
    Examples:
      cosmos plan recipes/arithmetic.toml
      cosmos plan recipes/arithmetic.toml --set policy.replicas=2
    """  # noqa: D301 - the escape keeps the lines after it apart
    chosen = _load(recipe, (model, algorithm, dataset, reward, environment), overrides, name)
    _plan(chosen, recipe)


def _plan(chosen: Recipe, recipe: Path | None) -> None:
    from cosmos_core.run.fork import in_fork  # noqa: PLC0415
    from cosmos_core.run.plan import show_plan  # noqa: PLC0415

    # A process that has imported torch takes most of a second to end; a fork ends at once.
    in_fork(partial(show_plan, chosen, recipe, console()))


def version() -> None:
    """Print the version."""
    from cosmos_core import __version__  # noqa: PLC0415

    typer.echo(__version__)


class _Commands(CommandGroup):
    core: ClassVar = {
        "run": run,
        "plan": plan,
        "status": runs.status,
        "export": runs.export,
        "plugins": plugins.app,
        "version": version,
    }


app = typer.Typer(
    name="cosmos",
    cls=_Commands,
    callback=_root,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def call(arguments: Sequence[str] | None) -> NoReturn:
    """Run a command line, by default this process's, and exit; the codes of `cosmos run` are those of all commands."""
    try:
        app(args=arguments, prog_name="cosmos")
    except CosmosError as error:
        if is_debugging():
            raise
        typer.echo(f"cosmos: {error}", err=True)
        other = 3 if isinstance(error, DataError | StorageError | CheckpointError) else 1
        sys.exit(2 if isinstance(error, ConfigError | PluginError) else other)
    sys.exit(0)


def _load(recipe: Path | None, names: tuple[str | None, ...], overrides: list[str] | None, name: str | None) -> Recipe:
    from cosmos_core.config.loading import load_recipe  # noqa: PLC0415

    kinds = ("model", "algorithm", "dataset", "reward", "environment")
    selections = {kind: chosen for kind, chosen in zip(kinds, names, strict=True) if chosen is not None}
    if recipe is None and not selections:
        raise ConfigError("give a recipe, or --model, --algorithm, --dataset and --reward; see cosmos run --help")
    # Names are strings even where they look like numbers.
    named = [f'run.name="{name}"'] if name is not None else []
    return load_recipe(recipe, overrides=[*(overrides or ()), *named], selections=selections, refuse=refuse)
