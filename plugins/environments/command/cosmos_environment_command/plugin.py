"""The agent `command`: a program does a task, in a process of its own, and calls the model over OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Agent, EnvironmentCapabilities, EnvironmentContext, Provider, Session, hookimpl
from cosmos_core.types import Prompt

_KEPT: Final = 1 << 16
"""Bytes of each output that are kept, the last ones."""
_SHOWN: Final = 300
_LOOK_S: Final = 0.05
_REST_S: Final = 5.0
"""Seconds for the rest of its outputs, once it has ended."""
_CHUNK: Final = 1 << 14


@attrs.frozen(kw_only=True)
class CommandOptions:
    """The program, and what is told of its output."""

    command: tuple[str, ...] = option(
        help='The program and its arguments, such as `["node", "agent.mjs"]`; no shell reads them.',
        validator=attrs.validators.min_len(1),
    )
    directory: str | None = option(None, help="Folder in which it runs; the current one of `cosmos run` if absent.")
    variables: Mapping[str, str] = option(factory=dict, help="More environment variables.")
    reward: bool = option(False, help="Whether the last line that it prints is its own reward, a number.")


class Command:
    """Starts the program for a task."""

    def __init__(self, options: CommandOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        """Find the program.

        Raises:
            ConfigError: There is none of that name here, or no such folder.
        """
        program, folder = options.command[0], Path(options.directory or ".")
        if not folder.is_dir():
            raise ConfigError(f"environment.options.directory: there is no folder {str(folder)!r} here")
        if not shutil.which(folder.absolute() / program if "/" in program else program):
            raise ConfigError(
                f"environment.options.command: there is no program {program!r} here; install it, or give its path"
            )
        self._options: Final = options

    async def run(self, session: Session, task: Prompt) -> float | None:
        """Run the program to its end.

        Raises:
            DataError: It ended in failure, or printed no reward where one is wanted.
        """
        options = self._options
        outputs = bytearray(), bytearray()
        process = await asyncio.create_subprocess_exec(
            *options.command,
            cwd=options.directory,
            env={**os.environ, **session.variables, **options.variables},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
        )
        streams = zip((process.stdout, process.stderr), outputs, strict=True)
        talking = asyncio.gather(_write(process, task), *(_keep_end(*each) for each in streams))
        try:
            await _ended(process)
        finally:
            # Whatever it started ends with it, also where the agent is cancelled, and with that its outputs. A process
            # that has left its group does not, and may hold them open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                await _ended(process)
                await asyncio.wait({talking}, timeout=_REST_S)
            finally:
                talking.cancel()
                process._transport.close()  # type: ignore[attr-defined] # noqa: SLF001 - nothing else closes its pipes
        printed, errors = (output.decode(errors="replace") for output in outputs)
        if process.returncode:
            said = errors.strip() or printed.strip() or "it printed nothing"
            raise DataError(f"{options.command[0]} ended with exit code {process.returncode}: {said[-_SHOWN:]}")
        return _reward_of(printed) if options.reward else None


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process; its own `wait` may wait for its outputs, too."""
    while process.returncode is None:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(_LOOK_S)


async def _write(process: asyncio.subprocess.Process, task: Prompt) -> None:
    """Give it the row; it need not read it."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(json.dumps(row_of(task)).encode())
        await process.stdin.drain()
    process.stdin.close()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()


async def _keep_end(stream: Any, kept: bytearray) -> None:
    """Read all of an output, and keep its end."""
    while data := await stream.read(_CHUNK):
        kept += data
        del kept[:-_KEPT]


def row_of(task: Prompt) -> dict[str, Any]:
    """The row as the program reads it: `text` or `messages`, `tools`, `reference`, `media` and `metadata`."""
    said: dict[str, Any] = {"text": task.text} if isinstance(task.text, str) else {"messages": task.messages}
    said |= {"tools": list(task.tools)} if task.tools else {}
    return {**said, "reference": task.reference, "media": list(task.media), "metadata": dict(task.metadata)}


def _reward_of(output: str) -> float:
    lines = output.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    try:
        value = float(last)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(
            f"the last line that the program printed is {last[:_SHOWN]!r}, and environment.options.reward says that it "
            "is its reward, a number"
        )
    return value


@hookimpl
def cosmos_environment() -> Provider[Agent]:
    """The provider hook."""
    capabilities = EnvironmentCapabilities(calls_model=True, rewards=True, deterministic=False)
    return Provider(create=Command, options=CommandOptions, capabilities=capabilities)
