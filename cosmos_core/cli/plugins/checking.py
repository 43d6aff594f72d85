"""`cosmos plugins check`: what a publisher wants to know before the first stranger does."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cosmos_core.cli.plugins.options import JsonOption, KindOption
from cosmos_core.errors import ConfigError

if TYPE_CHECKING:
    from cosmos_core.testing.check.kit import Given


def check_plugin(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME | PATH",
            help="An installed plugin (or DISTRIBUTION:NAME), a project's folder (./DIR) or a wheel "
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
    """Check metadata, import, options, compatibility and the conformance kit; print a verdict to paste.

    Exits with 0 if everything passed, with 1 if anything failed or could not be run.

    \b
    Examples:
      cosmos plugins check
      cosmos plugins check brevity
      cosmos plugins check dist/cosmos_reward_brevity-0.1.0-py3-none-any.whl --set options.length=80
    """  # noqa: D301 - the escape keeps the lines after it apart
    _need_pytest()
    from rich.console import Console  # noqa: PLC0415  # keeps `cosmos --help` quick

    from cosmos_core.plugins.discovery import DISABLE_VARIABLE  # noqa: PLC0415
    from cosmos_core.testing.check.examination import examine  # noqa: PLC0415
    from cosmos_core.testing.check.subject import subject  # noqa: PLC0415
    from cosmos_core.testing.check.verdict import plain, text  # noqa: PLC0415

    # Whoever asks for a plugin to be checked wants it to be seen, here and in every process of the check.
    os.environ.pop(DISABLE_VARIABLE, None)
    given = _given(overrides or [])
    with subject(target, kind) as found, Console(stderr=True).status("Looking") as status:
        verdict = examine(found, given, lambda doing: status.update(f"{found.name}: {doing}"))
    typer.echo(json.dumps(plain(verdict), indent=2) if as_json else text(verdict))
    if verdict.outcome != "PASSED":
        raise typer.Exit(1)


def _need_pytest() -> None:
    from importlib.util import find_spec  # noqa: PLC0415  # keeps `cosmos --help` quick

    if find_spec("pytest") is None:
        raise ConfigError('the kit needs pytest; install it with: pip install "cosmos-core[testing]"')


def _given(overrides: list[str]) -> Given:
    """What `--set` gives, structured.

    Raises:
        ConfigError: A key is none of those that a kit can be given.
    """
    from cosmos_core.config.overrides import apply_override  # noqa: PLC0415  # keeps `cosmos --help` quick
    from cosmos_core.config.structure import structure  # noqa: PLC0415
    from cosmos_core.testing.check.kit import Given  # noqa: PLC0415

    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override)
    return structure(data, Given, "--set")
