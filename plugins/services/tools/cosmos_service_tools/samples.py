"""The command `cosmos samples`: shows what a run's model answered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.errors import ConfigError


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    step: Annotated[int | None, typer.Option("--step", help="Of its batch, and of the evaluation after it.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Those prompts first whose samples have low rewards.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Those first whose samples have high rewards.")] = False,
    status: Annotated[str | None, typer.Option("--status", help="Of this status, such as truncated.")] = None,
    row: Annotated[int | None, typer.Option("--row", help="Of this row of the dataset.")] = None,
    position: Annotated[int | None, typer.Option("--position", help="Of this place in the stream of prompts.")] = None,
    grep: Annotated[str, typer.Option("--grep", metavar="REGEX", help="With this in prompt or completion.")] = "",
    purpose: Annotated[str | None, typer.Option("--purpose", help="Of train, or of evaluation.")] = None,
    count: Annotated[
        int | None, typer.Option("-n", min=1, help="Most prompts; 5, or all with --json, if absent.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print each sample, with all fields, as a line of JSON.")
    ] = False,
) -> None:
    """Show what a run's model answered, prompt by prompt, the newest first, with rewards and advantages.

    \b
    Examples:
      cosmos samples runs/arithmetic --step 12 --worst -n 3
      cosmos samples runs/arithmetic --purpose evaluation --json > held-out.jsonl
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.observe.output import console  # noqa: PLC0415
    from cosmos_service_tools.printed_samples import print_samples  # noqa: PLC0415

    if worst and best:
        raise ConfigError("--worst and --best: give one of them")
    wanted = {"step": step, "purpose": purpose, "status": status, "row": row, "position": position, "grep": grep}
    order = "worst" if worst else "best" if best else "newest"
    print_samples(run, console(), order=order, count=count, as_json=json, **wanted)
