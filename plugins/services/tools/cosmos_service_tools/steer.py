"""The commands `cosmos drain` and `cosmos set`: a replica leaves a run that goes on, and keys of its recipe change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[
    Path | None, typer.Option("--run", metavar="RUN", help="The run's folder; the one in runs/ that goes on if absent.")
]


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
    from cosmos_core.run.requests import ask  # noqa: PLC0415
    from cosmos_core.transport.messages import Drain  # noqa: PLC0415
    from cosmos_service_tools.runs import only_run  # noqa: PLC0415

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
    from cosmos_service_tools.runs import only_run  # noqa: PLC0415
    from cosmos_service_tools.settings import change_settings  # noqa: PLC0415

    changes = change_settings(only_run() if run is None else run, settings)
    for each in changes:
        when = f"step {each.step} on" + (", with which its stage begins" if each.waits else "")
        typer.echo(f"{each.key}: {each.before} until now, {each.after} from {when}")
    if not changes:
        typer.echo("Nothing to change: it is so already.")
