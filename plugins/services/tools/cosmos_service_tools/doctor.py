"""The command `cosmos doctor`: looks at this machine and installation, and says what is wrong and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Look also for what this recipe needs, a TOML file.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Look at this machine: Python, plugins, torch, GPUs, ports, shared memory, disks, limits, keys.

    Each line is ok, a warning or a problem, with what to do. The exit code is 1 if there is a problem, else 0.

    \b
    Examples:
      cosmos doctor
      cosmos doctor my.toml --json
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.examination import examine  # noqa: PLC0415
    from cosmos_service_tools.findings import plain, words  # noqa: PLC0415

    found = examine(recipe)
    typer.echo(plain(found) if as_json else words(found))
    raise typer.Exit(int(any(each.status == "problem" for each in found)))
