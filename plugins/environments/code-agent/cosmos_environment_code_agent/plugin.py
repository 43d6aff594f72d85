"""The agent `code-agent`: a model repairs a Python function with tools, and hidden tests score what it leaves."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.protocols import Agent, EnvironmentCapabilities, EnvironmentContext, Provider, Session, hookimpl
from cosmos_core.types import Prompt
from cosmos_environment_code_agent.tasks import Case, task_of
from cosmos_environment_code_agent.workspace import Limits, Workspace

ARGUMENTS: Final = {"run": "code", "write": "source"}
"""The tools, and the one argument of each."""
_DESCRIPTIONS: Final = {
    "run": "Run lines of Python after the file, in its module, and see what they print. Nothing of it stays.",
    "write": "Replace the file, and see whether the examples pass.",
}
_LIMITS: Final = ("context_length_exceeded", "max_turns")


@attrs.frozen(kw_only=True)
class CodeAgentOptions:
    """Options of the code agent."""

    run: bool = option(True, help="Whether the model has the tool `run`, beside `write`.")
    max_calls: int = option(8, help="Calls of tools that a task may take.", validator=check.ge(1))
    time_s: float = option(4.0, help="Seconds that one program may take.", validator=check.gt(0.0))
    memory_mb: int = option(256, help="MiB of address space of a program.", validator=check.ge(64))
    output_kb: int = option(16, help="KiB that a program may print.", validator=check.ge(1))
    shown_characters: int = option(
        2000, help="Characters of what a program printed that the model is shown, the last ones.", validator=check.ge(1)
    )


class CodeAgent:
    """Gives the model tools until it answers without a call, or its calls are used up; then runs the hidden tests."""

    def __init__(self, options: CodeAgentOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        self._options: Final = options
        self._tools: Final = ("run", "write") if options.run else ("write",)
        self._limits: Final = Limits(
            time_s=options.time_s,
            cpu_s=options.time_s,
            memory_bytes=options.memory_mb << 20,
            output_bytes=options.output_kb << 10,
        )

    async def run(self, session: Session, task: Prompt) -> float:
        """Have a function repaired.

        Returns:
            The share of the hidden tests that pass.

        Raises:
            DataError: The reference is no task.
            PluginError: Programs cannot be confined here.
        """
        repair = task_of(task.reference)
        async with Workspace(repair.source, self._limits) as workspace:
            await self._talk(session, task, workspace, repair.examples)
            values, _ = await workspace.values(repair.tests)
        return sum(value == case.value for value, case in zip(values, repair.tests, strict=True)) / len(values)

    async def _talk(self, session: Session, task: Prompt, workspace: Workspace, examples: Sequence[Case]) -> None:
        # It takes a second, for which neither `cosmos plan` nor other agents should wait.
        await asyncio.to_thread(importlib.import_module, "openai.resources.chat")
        from openai import APIStatusError  # noqa: PLC0415 - as above

        messages: list[Any] = task.messages
        left = self._options.max_calls
        while left:
            try:
                reply = await session.client.chat.completions.create(
                    model=session.model, messages=messages, tools=[_tool(name) for name in self._tools]
                )
            except APIStatusError as error:
                if error.code not in _LIMITS:
                    raise
                return  # what is there is scored, and the sample is truncated
            message = reply.choices[0].message
            if not message.tool_calls:
                return
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls[:left]:
                said = await self._answer(call.function.name, call.function.arguments, workspace, examples)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            left -= min(left, len(message.tool_calls))

    async def _answer(self, name: str, arguments: str, workspace: Workspace, examples: Sequence[Case]) -> str:
        """What a call of a tool is answered: its result, or what is wrong with it."""
        if name not in self._tools:
            return f"error: there is no tool {name!r:.80}, but {', '.join(self._tools)}"
        wanted = ARGUMENTS[name]
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"error: the arguments of {name} are no JSON: {error}"
        if not isinstance(given, Mapping) or given.keys() != {wanted} or not isinstance(given[wanted], str):
            return f'error: {name} takes {{"{wanted}": TEXT}}, not {json.dumps(given):.80}'
        if name == "run":
            printed = await workspace.run(given[wanted])
            return printed[-self._options.shown_characters :] or "nothing was printed"
        workspace.source = given[wanted]
        return await _tried(workspace, examples)


async def _tried(workspace: Workspace, examples: Sequence[Case]) -> str:
    """What the examples show: the first that fails, or that none does."""
    values, why = await workspace.values(examples)
    for case, value in zip(examples, values, strict=True):
        if value is None:
            return f"{case.call}: {why}"
        if value != case.value:
            return f"{case.call} is {value[:200]}, not {case.value}"
    return "all examples pass"


def _tool(name: str) -> dict[str, Any]:
    properties = {ARGUMENTS[name]: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [ARGUMENTS[name]]}
    return {
        "type": "function",
        "function": {"name": name, "description": _DESCRIPTIONS[name], "parameters": parameters},
    }


@hookimpl
def cosmos_environment() -> Provider[Agent]:
    """The provider hook."""
    # Programs may draw random numbers, and come close to their time limit.
    capabilities = EnvironmentCapabilities(rewards=True, deterministic=False, calls_model=True)
    return Provider(create=CodeAgent, options=CodeAgentOptions, capabilities=capabilities)
