"""`cosmos status`, `drain`, `set`, `export`: show a run, steer it, take its model."""

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
RunFolder = Annotated[
    Path | None, typer.Option("--run", metavar="RUN", help="The run's folder; the one in runs/ that goes on if absent.")
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


def drain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a replica, as in `cosmos status`.")],
    *,
    run: RunFolder = None,
) -> None:
    """Let a replica finish what it has begun, and leave the run; nothing is lost with it.

    \b
    Example:
      cosmos drain rollout-1 --run runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.run.requests import ask, only_run  # noqa: PLC0415
    from cosmos_core.transport.messages import Drain  # noqa: PLC0415

    ask(only_run() if run is None else run, Drain(name=name))
    typer.echo(f"{name} leaves as soon as it has finished what it has begun.")


def change(
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Dynamic keys of the recipe.")],
    *,
    run: RunFolder = None,
) -> None:
    """Change dynamic keys of a run's recipe while it goes on, at one step boundary for all of its replicas.

    \b
    Examples:
      cosmos set policy.optimizer.lr=5e-7 --run runs/arithmetic
      cosmos set rollout.sampling.temperature=0.8 sync.max_staleness=4
      cosmos set algorithm.options.clip_high=0.28
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.run.requests import only_run  # noqa: PLC0415
    from cosmos_core.run.settings import change_settings  # noqa: PLC0415

    changes = change_settings(only_run() if run is None else run, settings)
    for each in changes:
        when = f"step {each.step} on" + (", with which its stage begins" if each.waits else "")
        typer.echo(f"{each.key}: {each.before} until now, {each.after} from {when}")
    if not changes:
        typer.echo("Nothing to change: it is so already.")


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
