"""The command `cosmos reward-service`: serves reward plugins over HTTP."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def reward_service(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="Its scorers and bounds, as a TOML file.")],
    *,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen at, in place of the file's.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen at, in place of the file's.")] = None,
) -> None:
    """Serve reward plugins to runs: each in processes of its own, for images, videos and latents.

    Requests must bring the token that is in the environment as WFM_REWARD_TOKEN. Ctrl-C takes no more requests and
    waits for what was begun; a second Ctrl-C does not.

    \b
    Example:
      export WFM_REWARD_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
      cosmos reward-service --config rewards.toml
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_service_reward_service.serving import serve  # noqa: PLC0415
    from cosmos_service_reward_service.settings import load_settings  # noqa: PLC0415

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    overrides = {"host": host, "port": port}
    serve(load_settings(config, {key: value for key, value in overrides.items() if value is not None}), typer.echo)
