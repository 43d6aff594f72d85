"""The command `cosmos chat`: a dialogue with a model in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A run's folder (its latest checkpoint), or an exported model's folder.")
]
Plugin = Annotated[
    str | None, typer.Option("--plugin", metavar="NAME", help="Model plugin; that of the run it is from, or hf.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let Python code inside the model's folder run.")
]
Plain = Annotated[
    bool | None,
    typer.Option(
        "--plain/--template",
        help="Complete what is said as plain text, or put it in the template of chats; as its run learned if absent.",
    ),
]


def chat(
    model: Model,
    *,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system's turn.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", min=0.0, help="0 is greedy.")] = 0.7,
    max_units: Annotated[
        int, typer.Option("--max-units", metavar="N", min=1, help="Longest answer, in tokens.")
    ] = 1024,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the draws; random if absent.")
    ] = None,
    plain: Plain = None,
    plugin: Plugin = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk with a model. Ctrl-C ends an answer; at the prompt it ends the chat, as Ctrl-D and /exit do.

    /reset forgets what was said, /system TEXT says what the model is told first. What is piped in is a turn a line. A
    model without a template of chats, or of a run that learned from plain prompts, completes each line by itself.

    \b
    Examples:
      cosmos chat runs/my-run
      cosmos chat my-model --system "You are a pirate." --temperature 0
      cosmos chat runs/arithmetic --plain --temperature 0 < questions.txt
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.answers import speaking  # noqa: PLC0415
    from cosmos_service_tools.dialogue import Dialogue, talk  # noqa: PLC0415

    with speaking(model, plugin=plugin, trust_remote_code=trust_remote_code, plain=plain) as speaker:
        talk(Dialogue(speaker, system=system, temperature=temperature, max_units=max_units, seed=seed))
