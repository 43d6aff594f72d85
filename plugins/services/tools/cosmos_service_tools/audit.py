"""The command `cosmos audit`: proves the accounting of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Show what step N was trained on.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON, each step's batch included.")] = False,
) -> None:
    """Prove from a run's journal that each prompt was consumed exactly once, or dropped with a reason.

    Ends with code 1 if something does not add up. A run that goes on is audited as far as it has come.

    \b
    Examples:
      cosmos audit runs/arithmetic
      cosmos audit runs/arithmetic --step 12
      cosmos audit runs/arithmetic --json > audit.json
    """  # noqa: D301 - the escape keeps the lines after it apart
    from rich.console import Console  # noqa: PLC0415

    from cosmos_service_tools.audited import as_json, batch_of, show, show_batch  # noqa: PLC0415
    from cosmos_service_tools.auditor import audit_run  # noqa: PLC0415

    found = audit_run(run)
    console = Console()
    if json:
        typer.echo(as_json(found))
    elif step is not None:
        show_batch(batch_of(found, step), console)
    else:
        show(found, console)
    if found.problems:
        raise typer.Exit(1)
