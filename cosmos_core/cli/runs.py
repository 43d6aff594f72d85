"""`cosmos status`, `export`: show a run, take its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Step = Annotated[
    str,
    typer.Option(
        "--step",
        metavar="N|best|latest",
        help="Which checkpoint of a run; `best` by held-out accuracy, or reward of images and videos, or loss.",
    ),
]


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep showing it until it ends; Ctrl-C ends the watching only.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for programs; with --watch an object a second, each on a line.")
    ] = False,
) -> None:
    """Say how a run is doing (asking its controller), or how it ended (from its journal).

    \b
    Examples:
      cosmos status runs/arithmetic
      cosmos status runs/arithmetic --watch
      cosmos status runs/arithmetic --json
    """  # noqa: D301 - the escape keeps the lines after it apart
    from rich.console import Console  # noqa: PLC0415

    from cosmos_core.run import status as run_status  # noqa: PLC0415

    try:
        if watch and not json:
            run_status.watch(run, Console())
            return
        for text in run_status.tell(run, watches=watch) if json else run_status.look(run):
            typer.echo(text)
    except KeyboardInterrupt:
        typer.echo(f"No longer watching; {run} goes on.", err=True)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    step: Step = "latest",
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "--to",
            metavar="DIR|URL",
            help="Where to, a folder or a URL such as s3://bucket/model; the run's export/ if absent.",
        ),
    ] = None,
    *,
    average: Annotated[
        bool | None,
        typer.Option(
            "--average/--no-average",
            help="Write the moving average of the weights, or the weights; as `policy.average` says if absent.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="float32|bfloat16|float16",
            help="Of the weights; that of the checkpoint which the run began with if absent.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, for `AutoModelForCausalLM.from_pretrained` and anything else.

    \b
    Examples:
      cosmos export runs/arithmetic
      cosmos export runs/arithmetic --step best --output my-model
      cosmos export runs/arithmetic --to s3://bucket/models/arithmetic --dtype bfloat16
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.run.export import export_run  # noqa: PLC0415

    exported = export_run(run, step=step, output=output, average=average, dtype=dtype)
    typer.echo(f"Exported step {exported.step} to {exported.place} in {' and '.join(exported.dtypes)}")
    if exported.note:
        typer.echo(exported.note)
