"""The command `cosmos replica`: adds a replica to a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cosmos_core.transport.messages import Role

JoinedRun = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN", help="The run's folder, as this machine sees it; found in runs/ if absent."),
]
Controller = Annotated[
    str | None,
    typer.Option("--controller", metavar="ADDR", help="tcp://HOST:PORT of the run's controller, as in its folder."),
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="The replica's name; a new one if absent.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _replica() -> None:
    """Add a replica to a run that goes on, from any machine that sees the run's folder.

    Ctrl-C lets it finish what it has begun, and leave; a second Ctrl-C kills it. It ends with the run.

    \b
    Examples:
      cosmos replica rollout --run runs/arithmetic
      cosmos replica policy --controller tcp://10.0.0.5:5551 --run /mnt/shared/runs/arithmetic
    """  # noqa: D301 - the escape keeps the lines after it apart


@app.command()
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


@app.command()
def rollout(*, controller: Controller = None, run: JoinedRun = None, name: Name = None) -> None:
    """Add a rollout replica: it generates as soon as it has the newest weights.

    \b
    Examples:
      cosmos replica rollout --run runs/arithmetic
      CUDA_VISIBLE_DEVICES=3 cosmos replica rollout --controller tcp://127.0.0.1:40123
    """  # noqa: D301 - the escape keeps the lines after it apart
    _join("rollout", controller, run, name, None)


def _join(role: Role, controller: str | None, run: Path | None, name: str | None, checkpoint: str | None) -> None:
    from cosmos_service_tools.joining import find_run, join, prepare  # noqa: PLC0415

    folder, address = find_run(controller, run)
    new = prepare(role, folder, address, name=name, checkpoint=checkpoint)
    raise typer.Exit(join(new, typer.echo))
