"""The command `cosmos generate`: completions of prompts, in the terminal or as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_service_tools.chat import Plugin, TrustRemoteCode

Source = Annotated[
    Path, typer.Argument(metavar="RUN|MODEL", help="A run's folder (its latest checkpoint), or an exported folder.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0.0, help="0 is greedy, or without noise in the steps.")
]
NumSamples = Annotated[
    int, typer.Option("--samples", metavar="N", min=1, help="Completions of each prompt; each video has the next seed.")
]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where images and videos of world models go.")]
MaxUnits = Annotated[
    int | None,
    typer.Option("--max-units", metavar="N", min=1, help="Longest completion, in tokens, or denoising steps."),
]
_MEDIA_HELP = "An image or a video that each prompt shows, or that a world model goes on from; repeatable."
Media = Annotated[
    list[Path] | None, typer.Option("--image", "--video", metavar="FILE", exists=True, readable=True, help=_MEDIA_HELP)
]
_FRAMES_HELP = "How many last frames of the video a world model goes on from; as in its run, else 1."
GivenFrames = Annotated[int | None, typer.Option("--given-frames", metavar="N", min=1, help=_FRAMES_HELP)]
Escapes = Annotated[bool, typer.Option("-e", "--escapes", help="Read \\n and \\t in prompts as line break and tab.")]


def generate(
    source: Source,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to complete.")],
    *,
    max_units: MaxUnits = None,
    temperature: Temperature = 0.0,
    num_samples: NumSamples = 1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the draws.")] = 0,
    plugin: Plugin = None,
    output: Output = Path("generated"),
    media: Media = None,
    given_frames: GivenFrames = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's turn of a chat.")] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system's turn before it; implies --chat.")
    ] = None,
    escapes: Escapes = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Complete prompts with a model, by the same engine that training uses; images and videos become files.

    \b
    Examples:
      cosmos generate runs/arithmetic/export -e "Ann has 7 cards, buys 5 more, then loses 4. How many cards now?\\n"
      cosmos generate my-model --chat "Who are you?" --system "You are a pirate."
      cosmos generate my-model "Once upon a time" --temperature 0.8 --samples 3 --max-units 64
      cosmos generate runs/wan-tiny-sft red --output videos
      cosmos generate runs/my-world "The arm lifts the cup." --video clip.mp4 --given-frames 5
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.generation import complete_prompts  # noqa: PLC0415

    if not escapes and any("\\n" in prompt for prompt in prompts):
        typer.echo("A prompt has \\n in it, as two characters; -e reads it as a line break.", err=True)
    if escapes:
        prompts = [prompt.replace("\\n", "\n").replace("\\t", "\t") for prompt in prompts]
    texts = complete_prompts(
        source,
        prompts,
        plugin=plugin,
        max_units=max_units,
        temperature=temperature,
        num_samples=num_samples,
        seed=seed,
        output=output,
        media=[str(path) for path in media or ()],
        given_frames=given_frames,
        as_chat=chat,
        system=system,
        trust_remote_code=trust_remote_code,
    )
    for prompt, completions in zip(prompts, texts, strict=True):
        for completion in completions:
            typer.echo(f"> {prompt}\n{completion}\n")
