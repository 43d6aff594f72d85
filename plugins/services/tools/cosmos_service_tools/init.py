"""The command `cosmos init`: writes a recipe for a model and data, and plans it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="The recipe to write.")] = Path("recipe.toml"),
    *,
    model: Annotated[
        str | None, typer.Option("--model", metavar="FOLDER|NAME", help="A model's folder, or its name on the Hub.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE|FOLDER|NAME",
            help="A .jsonl, .json, .csv or .parquet file, a folder of them, or NAME or NAME:CONFIG on the Hub.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="Algorithm plugin: sft, grpo, dpo, …; by the columns if absent."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="cpu|gpu|N", help="A CPU, one GPU, or N GPUs; this machine's.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="NAME", help="Reward plugin, where the task needs one; by the answers' look."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take what is detected.")] = False,
) -> None:
    """Write a recipe for a model and data of yours, and plan it. On a terminal it asks for what is not given.

    It looks at the first rows and at the model's files, and chooses columns, reward, sizes and learning rate; change
    them in the file.

    \b
    Examples:
      cosmos init my.toml
      cosmos init my.toml --model Qwen/Qwen3-0.6B --data questions.jsonl --yes
      cosmos init my.toml --model ./my-model --data openai/gsm8k:main --task grpo --hardware 8 --yes
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.questions import Answers, ask, make  # noqa: PLC0415

    given = Answers(model=model, data=data, task=task, hardware=hardware, reward=reward)
    make(ask(path, given, takes_defaults=yes), typer.echo)
