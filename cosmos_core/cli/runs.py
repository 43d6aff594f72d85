"""`cosmos status`, `replica`, `export`: show a run, add to it, take its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cosmos_core.transport.messages import Role

Step = Annotated[
    str,
    typer.Option(
        "--step",
        metavar="N|best|latest",
        help="Which checkpoint of a run; `best` by held-out accuracy, or reward of images and videos, or loss.",
    ),
]
JoinedRun = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN", help="The run's folder, as this machine sees it; found in runs/ if absent."),
]
Controller = Annotated[
    str | None,
    typer.Option("--controller", metavar="ADDR", help="tcp://HOST:PORT of the run's controller, as in its folder."),
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="The replica's name; a new one if absent.")]


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


replica = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@replica.callback()
def _replica() -> None:
    """Add a replica to a run that goes on, from any machine that sees the run's folder.

    Ctrl-C lets it finish what it has begun, and leave; a second Ctrl-C kills it. It ends with the run.

    \b
    Examples:
      cosmos replica rollout --run runs/arithmetic
      cosmos replica policy --controller tcp://10.0.0.5:5551 --run /mnt/shared/runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart


@replica.command()
def policy(
    *,
    controller: Controller = None,
    run: JoinedRun = None,
    name: Name = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="PATH", help="Start from it, not from the weights of the others."),
    ] = None,
) -> None:
    """Add a policy replica, with all of its processes: each step's batch is shared with it from its first step on.

    \b
    Examples:
      cosmos replica policy --run runs/arithmetic
      cosmos replica policy --controller tcp://127.0.0.1:40123 --name policy-b
    """  # noqa: D301 - the escape keeps the lines after it apart
    _join("policy", controller, run, name, checkpoint)


@replica.command()
def rollout(*, controller: Controller = None, run: JoinedRun = None, name: Name = None) -> None:
    """Add a rollout replica: it generates as soon as it has the newest weights.

    \b
    Examples:
      cosmos replica rollout --run runs/arithmetic
      CUDA_VISIBLE_DEVICES=3 cosmos replica rollout --controller tcp://127.0.0.1:40123
    """  # noqa: D301 - the escape keeps the lines after it apart
    _join("rollout", controller, run, name, None)


def _join(role: Role, controller: str | None, run: Path | None, name: str | None, checkpoint: str | None) -> None:
    from cosmos_core.run.replica import find_run, join, prepare  # noqa: PLC0415

    folder, address = find_run(controller, run)
    new = prepare(role, folder, address, name=name, checkpoint=checkpoint)
    raise typer.Exit(join(new, typer.echo))
