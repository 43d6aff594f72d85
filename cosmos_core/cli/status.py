"""`cosmos status`: how a run is doing, or how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.cli.options import Debug, set_debugging


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    debug: Debug = False,
) -> None:
    """Say how a run is doing (asking its controller), or how it ended (from its journal).

    \b
    Example:
      cosmos status runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart
    set_debugging(debug)
    from cosmos_core.run.look import look  # noqa: PLC0415

    for text in look(run):
        typer.echo(text)
