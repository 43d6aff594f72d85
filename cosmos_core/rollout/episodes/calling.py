"""The session of an agent, in its worker: where it calls the model, and clients that do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from cosmos_core.errors import PluginBrokenError
from cosmos_core.protocols import Agent
from cosmos_core.types import Prompt


class Clients:
    """Clients of sessions that share their connections: each of its own would cost more than most calls."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @cached_property
    def _first(self) -> Any:
        try:
            import openai  # noqa: PLC0415 - where an agent asks for it
        except ImportError as error:
            raise PluginBrokenError(
                "session.client is an openai.AsyncOpenAI, and the package is not installed here: pip install openai, "
                "or give session.base_url and session.key to another client"
            ) from error
        # The session has its own time, and to ask again is to call once more.
        return openai.AsyncOpenAI(api_key="none", base_url="http://none.invalid", timeout=None, max_retries=0)

    async def close(self) -> None:
        """Close their connections, if there are any."""
        if "_first" in self.__dict__:
            await self._first.close()

    def of(self, base_url: str, key: str) -> Any:
        """A client that calls for the session.

        Raises:
            PluginBrokenError: This is not the event loop of the worker, whose connections it has.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None or (self._loop or loop) is not loop:
            raise PluginBrokenError(
                "session.client calls on the worker's event loop alone: a plain function makes a client of its own, "
                "openai.OpenAI(base_url=session.base_url, api_key=session.key)"
            )
        self._loop = loop
        return self._first.with_options(base_url=base_url, api_key=key)


@attrs.define(kw_only=True, eq=False)
class AgentSession:
    """See `cosmos_core.protocols.Session`."""

    base_url: str
    key: str
    model: str
    seed: int
    clients: Clients

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables for a program."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "OPENAI_DEFAULT_MODEL": self.model,
            "COSMOS_SEED": str(self.seed),
        }

    @property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI`."""
        return self.clients.of(self.base_url, self.key)


async def done_by(agent: Agent, session: AgentSession, task: Prompt) -> Any:
    """Have an agent do a task, a plain function in a thread; returns what it returned."""
    run: Any = agent.run
    if inspect.iscoroutinefunction(run):
        return await run(session, task)
    value = await asyncio.to_thread(run, session, task)
    return await value if inspect.isawaitable(value) else value
