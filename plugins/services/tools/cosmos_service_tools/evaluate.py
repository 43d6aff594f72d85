"""The command `cosmos eval`: held-out prompts are completed greedily and scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.cli.runs import Step
from cosmos_service_tools.chat import TrustRemoteCode


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL", help="A run's folder (its latest checkpoint), or an exported folder.")
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", metavar="FILE", help="Dataset and rewards; those of the run whose folder it lies in, if absent."
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", metavar="N", min=1, help="Held-out prompts; the recipe's if absent.")
    ] = None,
    step: Step = "latest",
    *,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="KEY", help="Group by this key of the prompts' metadata, such as labels."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the figures there, too, as JSON.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Complete held-out prompts greedily and score them.

    \b
    Examples:
      cosmos eval runs/arithmetic
      cosmos eval runs/arithmetic --step best --prompts 64
      cosmos eval my-model --recipe recipes/arithmetic.toml
      cosmos eval my-model --recipe benchmark.toml --by labels --output benchmark.json
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.evaluation import evaluate_model  # noqa: PLC0415
    from cosmos_service_tools.scores import check_place, figures, lines, write  # noqa: PLC0415

    check_place(output)
    result = evaluate_model(
        source, recipe_path=recipe, num_prompts=prompts, step=step, trust_remote_code=trust_remote_code, by=by
    )
    typer.echo("\n".join([*figures(result), *(["", *lines(result, by)] if by is not None else [])]))
    if output is not None:
        write(result, output, by)
