"""`cosmos status`: how a run is doing, or how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.cli.options import Debug, set_debugging


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep showing it until it ends; Ctrl-C ends the watching only.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Say how a run is doing (asking its controller), or how it ended (from its journal).

    \b
    Examples:
      cosmos status runs/arithmetic
      cosmos status runs/arithmetic --watch
    """  # noqa: D301 - the escape keeps the lines after it apart
    set_debugging(debug)
    if watch:
        _watch(run)
        return
    from cosmos_core.run.watching.look import look  # noqa: PLC0415

    for text in look(run):
        typer.echo(text)


def _watch(run: Path) -> None:
    from rich.console import Console  # noqa: PLC0415

    from cosmos_core.run.watching.watch import watch  # noqa: PLC0415

    try:
        watch(run, Console())
    except KeyboardInterrupt:
        typer.echo(f"No longer watching; {run} goes on.", err=True)
