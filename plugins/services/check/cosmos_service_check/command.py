"""The command `cosmos check`: a plugin's distribution is judged before it is published."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cosmos_core.protocols import Kind
    from cosmos_service_check.examination import Given


def _kind(typed: str) -> Kind:
    from cosmos_core.protocols import KINDS  # noqa: PLC0415

    for kind in KINDS:
        if kind == typed:
            return kind
    raise typer.BadParameter(f"{typed!r} is not one of {', '.join(KINDS)}.")


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DISTRIBUTION | NAME | PATH",
            help="An installed distribution, one plugin (or DISTRIBUTION:NAME), a project's folder (./DIR) or a wheel "
            "(tested with its project's tests if it lies in that project's dist/); without it, this folder's project.",
        ),
    ] = None,
    kind: Annotated[
        Any, typer.Option("--kind", metavar="KIND", parser=_kind, help="Only plugins of this kind.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="What to test with: options.NAME=VALUE, config.NAME=VALUE or path=DIR of a model. "
            "The kit is then run with it instead of with the project's own tests.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
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
