"""Commands for authors: `cosmos plugins new` makes a package, `cosmos check` judges one before it is published."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cosmos_core.cli.plugins import JsonOption, KindOption

if TYPE_CHECKING:
    from cosmos_service_check.examination import Given


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DISTRIBUTION | NAME | PATH",
            help="An installed distribution, one plugin (or DISTRIBUTION:NAME), a project's folder (./DIR) or a wheel "
            "(tested with its project's tests if it lies in that project's dist/); without it, this folder's project.",
        ),
    ] = None,
    kind: KindOption = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="What to test with: options.NAME=VALUE, config.NAME=VALUE or path=DIR of a model. "
            "The kit is then run with it instead of with the project's own tests.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a plugin's metadata, import, options, compatibility and conformance kit; print a verdict to paste.

    Exits with 0 if everything passed, with 1 if anything failed or could not be run.

    \b
    Examples:
      cosmos check
      cosmos check brevity
      cosmos check dist/cosmos_reward_brevity-0.1.0-py3-none-any.whl --set options.length=80
    """  # noqa: D301 - the escape keeps the lines after it apart
    from rich.console import Console  # noqa: PLC0415

    from cosmos_service_check.examination import examine  # noqa: PLC0415
    from cosmos_service_check.subject import subject  # noqa: PLC0415
    from cosmos_service_check.verdict import plain, text  # noqa: PLC0415

    given = _given(overrides or [])
    with subject(target, kind) as found, Console(stderr=True).status("Looking") as status:
        verdict = examine(found, given, lambda doing: status.update(f"{found.name}: {doing}"))
    typer.echo(json.dumps(plain(verdict), indent=2) if as_json else text(verdict))
    if verdict.outcome != "PASSED":
        raise typer.Exit(1)


def _given(overrides: list[str]) -> Given:
    """Structure the values of `--set`; raises ConfigError if a key is none of those that a kit can be given."""
    from cosmos_core.config.overrides import apply_override  # noqa: PLC0415
    from cosmos_core.config.structure import structure  # noqa: PLC0415
    from cosmos_service_check.examination import Given  # noqa: PLC0415

    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override)
    return structure(data, Given, "--set")


def new_plugin(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="model, algorithm, reward, dataset, engine, environment, agent, launcher, hook"
        ),
    ],
    name: Annotated[str, typer.Argument(help="What recipes will call it, such as brevity or short-answers.")],
    *,
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Folder in which to make the package's.")
    ] = Path(),
    author: Annotated[str, typer.Option("--author", metavar="NAME", help="Who makes it, for its metadata.")] = "",
    description: Annotated[
        str, typer.Option("--description", metavar="TEXT", help="One line about it, for its metadata.")
    ] = "",
    function: Annotated[
        str, typer.Option("--from", metavar="PATH.py:NAME", help="Make it of this function or class.")
    ] = "",
) -> None:
    """Write a complete package with a small working plugin: options, tests, an example recipe, CI that publishes it.

    \b
    Examples:
      cosmos plugins new reward brevity
      cosmos plugins new reward brevity --from my_rewards.py:brevity
      cosmos plugins new dataset chess-puzzles --into ~/plugins --author "Ann Lee"
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_check.scaffold import new_package  # noqa: PLC0415

    folder = new_package(what, name, into=into.expanduser(), author=author, description=description, function=function)
    typer.echo(f"Made {folder}/. Next:\n")
    for command, purpose in (
        (f"cd {shlex.quote(str(folder))}", ""),
        ("pip install --editable . --group dev", "pip 25.1 or newer; from then on recipes may name it"),
        ("pytest", "the conformance kit, and its own tests"),
        ("cosmos run example.toml", "a few steps on this machine"),
        ("cosmos check .", "whether it is fit to be published"),
    ):
        typer.echo(f"  {command:<40}{f'# {purpose}' if purpose else ''}".rstrip())
