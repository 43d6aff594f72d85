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

    @cached_property
    def _first(self) -> Any:
        try:
            import openai  # noqa: PLC0415 - where an agent asks for it
        except ImportError as error:
            raise PluginBrokenError(
                "session.client is an openai.AsyncOpenAI, and the package is not installed here: pip install openai, "
                "or give session.base_url and session.key to another client"
            ) from error
        return openai.AsyncOpenAI(api_key="none", base_url="http://none.invalid")

    async def close(self) -> None:
        """Close their connections, if there are any."""
        if "_first" in self.__dict__:
            await self._first.close()

    def of(self, base_url: str, key: str) -> Any:
        """A client that calls for the session."""
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
