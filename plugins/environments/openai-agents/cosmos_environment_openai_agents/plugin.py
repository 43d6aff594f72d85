"""The agent `openai-agents`: an agent of the OpenAI Agents SDK, as its program has it, does the tasks of a dataset."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import attrs

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Agent, EnvironmentCapabilities, EnvironmentContext, Provider, Session, hookimpl
from cosmos_core.types import Prompt

_FIELD: Final = re.compile(r"\{(\w+)\}")


def _names_an_object(_options: Any, _field: Any, value: str) -> None:
    module, _, name = value.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"{value!r} names no object; write MODULE:NAME or FILE.py:NAME")


@attrs.frozen(kw_only=True)
class AgentsOptions:
    """Options of agents of the SDK."""

    agent: str = option(
        help="The agent of the SDK: `package.module:name`, or `path/file.py:name`.", validator=_names_an_object
    )
    input: str | None = option(
        None,
        help="What it is asked, with fields of the row's metadata in braces; the row's text, or its turns, if absent.",
    )
    api: Literal["responses", "chat"] = option("responses", help="API of OpenAI's by which it calls the model.")


class SdkAgent:
    """Runs an agent of the SDK on a task. Rewards are others': the SDK has none."""

    def __init__(self, options: AgentsOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        """Find the agent.

        Raises:
            ConfigError: There is none of that name.
        """
        self._options: Final = options
        self._agent: Final = _found(options.agent)

    async def run(self, session: Session, task: Prompt) -> None:
        """Run it until its final output.

        Raises:
            DataError: The row lacks a field of `input`.
        """
        import agents  # noqa: PLC0415 - planning needs none of it

        client, is_chat = session.client, self._options.api == "chat"
        provider = agents.OpenAIProvider(openai_client=client, use_responses=not is_chat)
        await agents.Runner.run(
            self._agent,
            self._input(task),
            max_turns=sys.maxsize,  # the session's limit is the run's
            run_config=agents.RunConfig(
                model=session.model,
                model_provider=provider,
                tracing_disabled=True,
                tool_not_found_behavior="return_error_to_model",  # else a model that invents a tool ends the session
            ),
        )

    def _input(self, task: Prompt) -> Any:
        if self._options.input is not None:
            return _FIELD.sub(functools.partial(_field, task), self._options.input)
        if isinstance(task.text, str):
            return task.text
        if any(turn.tool_calls or turn.role == "tool" for turn in task.text):
            raise DataError("the row's turns call tools, which are not the program's; set environment.options.input")
        return [{"role": turn.role, "content": turn.content} for turn in task.text]


def _field(task: Prompt, match: re.Match[str]) -> str:
    if match[1] not in task.metadata:
        known = ", ".join(task.metadata) or "none"
        raise DataError(f"environment.options.input: the row has no {match[1]!r} in its metadata, but {known}")
    return str(task.metadata[match[1]])


@functools.cache
def _found(place: str) -> Any:
    """The agent; once in a process, however many tasks it does."""
    path, _, name = place.rpartition(":")
    where = f"environment.options.agent: {place!r}"
    try:
        from agents import Agent as OfSdk  # noqa: PLC0415 - planning finds it, too

        found = getattr(_module(path), name)
    except (Exception, SystemExit) as error:  # a program may do anything when it is imported
        raise ConfigError(f"{where} cannot be had: {type(error).__name__}: {error}") from error
    if not isinstance(found, OfSdk):
        raise ConfigError(f"{where} is no agents.Agent but {found!r:.80}")
    return found


def _module(path: str) -> ModuleType:
    if not path.endswith(".py"):
        return importlib.import_module(path)
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"agent_of_{file.stem}", file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@hookimpl
def cosmos_environment() -> Provider[Agent]:
    """The provider hook."""
    capabilities = EnvironmentCapabilities(calls_model=True, deterministic=False)
    return Provider(create=SdkAgent, options=AgentsOptions, capabilities=capabilities)
