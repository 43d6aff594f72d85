"""The command `cosmos recover`: a new journal in the place of a damaged one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recover(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Checkpoint to go on from; the newest if absent.")
    ] = None,
) -> None:
    """Put a new journal in the place of one that is damaged or gone; the run then goes on from a checkpoint.

    The damaged journal is kept beside it. What came after the checkpoint is given up. With --step, a run whose journal
    is sound goes back to that checkpoint as well, when it is resumed.

    \b
    Examples:
      cosmos recover runs/arithmetic && cosmos run --resume runs/arithmetic
      cosmos recover runs/arithmetic --step 80 && cosmos launch slurm --resume runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.recovery import recover as recover_run  # noqa: PLC0415

    done = recover_run(run, step=step)
    if done.damage:
        typer.echo(done.damage.partition("; cosmos recover")[0])
    if done.aside is not None:
        typer.echo(f"Kept aside as {done.aside}")
    for note in done.notes:
        typer.echo(note)
    typer.echo(f"The run can go on from step {done.step} ({done.checkpoint}): cosmos run --resume {run}")
