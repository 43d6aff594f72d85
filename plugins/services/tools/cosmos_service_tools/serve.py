"""The command `cosmos serve`: a model for clients of OpenAI's API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cosmos_service_tools.chat import Model, Plain, Plugin, TrustRemoteCode


class Engine(StrEnum):
    """The program that generates."""

    embedded = "embedded"
    vllm = "vllm"


def serve(
    model: Model,
    *,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes one that is free.")
    ] = 8000,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    engine: Annotated[
        Engine | None, typer.Option("--engine", help="vllm hands over to `vllm serve`; that where vLLM is installed.")
    ] = None,
    plain: Plain = None,
    plugin: Plugin = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model as OpenAI's API does: chats with tools, responses and completions, whole and as streams.

    Nobody is asked who they are: beyond 127.0.0.1 anybody who reaches the port may use it. Ctrl-C ends it.
    Of a run that learned from plain prompts, a chat of one turn is completed as plain text.

    \b
    Examples:
      cosmos serve runs/arithmetic
      cosmos serve my-model --port 8001 --engine embedded
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_tools.answers import model_folder, name_of, speaking, why_plain  # noqa: PLC0415
    from cosmos_service_tools.server import listen, serve_speaker, warn_of_strangers  # noqa: PLC0415
    from cosmos_service_tools.vllm_server import has_vllm, serve_vllm  # noqa: PLC0415

    is_vllm = engine is Engine.vllm or (engine is None and has_vllm())
    with listen(host, port) as socket:
        warn_of_strangers(host)
        if not is_vllm:
            with speaking(model, plugin=plugin, trust_remote_code=trust_remote_code, plain=plain) as speaker:
                serve_speaker(speaker, name_of(model), socket)
            return
        port = socket.getsockname()[1]
    if why := why_plain(model, plain):
        typer.echo(f"vLLM puts chats in the model's template; ask /v1/completions ({why}).", err=True)
    with model_folder(model, plugin=plugin, trust_remote_code=trust_remote_code) as (directory, config):
        serve_vllm(directory, name_of(model), host, port, trust_remote_code=config.trust_remote_code)
