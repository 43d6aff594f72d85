"""`cosmos status`, `cosmos audit` and `cosmos recover`: show a run, prove its accounting, replace its journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep showing it until it ends; Ctrl-C ends the watching only.")
    ] = False,
) -> None:
    """Say how a run is doing (asking its controller), or how it ended (from its journal).

    \b
    Examples:
      cosmos status runs/arithmetic
      cosmos status runs/arithmetic --watch
    """  # noqa: D301 - the escape keeps the lines after it apart
    from rich.console import Console  # noqa: PLC0415

    from cosmos_core.run import status as run_status  # noqa: PLC0415

    if not watch:
        for text in run_status.look(run):
            typer.echo(text)
        return
    try:
        run_status.watch(run, Console())
    except KeyboardInterrupt:
        typer.echo(f"No longer watching; {run} goes on.", err=True)


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

    from cosmos_core.run.audit import as_json, audit_run, batch_of, show, show_batch  # noqa: PLC0415

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


def recover(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Checkpoint to go on from; the newest if absent.")
    ] = None,
) -> None:
    """Put a new journal in the place of one that is damaged or gone; the run then goes on from a checkpoint.

    The damaged journal is kept beside it. What came after the checkpoint is given up. With --step, a run whose journal
    is sound goes back to that checkpoint, too, whoever resumes it then.

    \b
    Examples:
      cosmos recover runs/arithmetic && cosmos run --resume runs/arithmetic
      cosmos recover runs/arithmetic --step 80 && cosmos launch slurm --resume runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.run.recovery import recover as recover_run  # noqa: PLC0415

    done = recover_run(run, step=step)
    if done.damage:
        typer.echo(done.damage.partition("; cosmos recover")[0])
    if done.aside is not None:
        typer.echo(f"Kept aside as {done.aside}")
    for note in done.notes:
        typer.echo(note)
    typer.echo(f"The run can go on from step {done.step} ({done.checkpoint}): cosmos run --resume {run}")
