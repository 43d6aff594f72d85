"""Tools that chats may call, and turns with calls of them, in the JSON of OpenAI's API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cosmos_core.errors import DataError
from cosmos_core.types.prompt import JSON, Message, ToolCall

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Names of tools."""


def read_tools(value: Any) -> tuple[Mapping[str, JSON], ...]:
    """A list of tools: `{"type": "function", "function": {"name", "description", "parameters"}}` each.

    Raises:
        DataError: One is something else, its parameters are no JSON Schema of an object, or two have one name.
    """
    if not isinstance(value, list | tuple):
        raise DataError(f"tools are {value!r:.80}; give a list of objects of OpenAI's API")
    names: set[str] = set()
    for number, tool in enumerate(value, 1):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function" or not isinstance(name, str):
            raise DataError(f"tool {number} is {tool!r:.80}; give {{'type': 'function', 'function': {{'name': …, …}}}}")
        if not TOOL_NAME.fullmatch(name):
            raise DataError(
                f"tool {number} is named {name!r:.160}; a name is 1 to 128 letters, digits, '_', '-' and '.'"
            )
        if name in names:
            raise DataError(f"tool {number} is named {name!r}, and so is another before it; names tell tools apart")
        names.add(name)
        _check_function(name, function)
    return tuple(value)


def _check_function(name: str, function: Mapping[str, Any]) -> None:
    if not isinstance(function.get("description", ""), str):
        raise DataError(f"tool {name!r}: the description is {function['description']!r:.80}; give text")
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise DataError(f"tool {name!r}: parameters are {parameters!r:.80}; give a JSON Schema whose type is 'object'")
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        raise DataError(f"tool {name!r}: properties are {properties!r:.80}; give a JSON Schema for each parameter")
    required = parameters.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
        raise DataError(f"tool {name!r}: required is {required!r:.80}; give a list of names of parameters")
    try:
        json.dumps(function, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"tool {name!r} holds what JSON cannot: {error}") from error


def read_messages(value: Any) -> tuple[Message, ...]:
    """A list of turns, with `tool_calls`, `tool_call_id` and `reasoning_content` where they have them.

    Raises:
        DataError: One has no role or content, or a call cannot be read.
    """
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"turns are {value!r:.80}; give a list of objects with `role` and `content`")
    return tuple(_message(turn, number) for number, turn in enumerate(value, 1))


def _message(turn: Any, number: int) -> Message:
    given = turn if isinstance(turn, Mapping) else {}
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls") or ()
    if calls and role != "assistant":
        raise DataError(f"turn {number} is of {role!r:.80} and has `tool_calls`; only the assistant calls tools")
    if content is None and calls:
        content = ""
    if not (isinstance(role, str) and role and isinstance(content, str)):
        raise DataError(f"turn {number} has no text for both `role` and `content`")
    if not isinstance(calls, list | tuple):
        raise DataError(f"turn {number}: tool_calls are {calls!r:.80}; give a list")
    answered = given.get("tool_call_id") or ""
    reasoning = given.get("reasoning_content") or given.get("reasoning") or ""
    if not (isinstance(answered, str) and isinstance(reasoning, str)):
        raise DataError(f"turn {number}: tool_call_id and reasoning_content are text")
    return Message(
        role=role,
        content=content,
        tool_calls=tuple(_call(call, f"turn {number}: call {place}") for place, call in enumerate(calls, 1)),
        tool_call_id=answered if role == "tool" else "",
        reasoning=reasoning if role == "assistant" else "",
    )


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise DataError(f"{where} is {call!r:.80}; give {{'function': {{'name': …, 'arguments': …}}}}")
    arguments, id_ = function.get("arguments", "{}"), call.get("id") or ""
    try:
        # Many data sets have an object in the place of its text.
        text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else str(arguments)
        value = loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where} of {name!r}: arguments are {arguments!r:.80}, no JSON: {error}") from error
    if not isinstance(arguments, str | Mapping) or not isinstance(value, dict):
        raise DataError(f"{where} of {name!r}: arguments are {arguments!r:.80}; give the JSON text of an object")
    if not isinstance(id_, str):
        raise DataError(f"{where} of {name!r}: the id is {id_!r:.80}; give text")
    return ToolCall(name=name, arguments=text, id=id_)


def loads(text: str) -> Any:
    """The value of a JSON text; a ValueError of what is none, NaN and infinities among it."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def arguments_of(call: ToolCall) -> Mapping[str, JSON]:
    """The arguments of a call; a DataError if they are no JSON of an object."""
    try:
        found: Any = loads(call.arguments)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a call of {call.name!r}: arguments {call.arguments!r:.80} are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"a call of {call.name!r}: arguments {call.arguments!r:.80} are no JSON object")
    return found


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of tools that `read_tools` has read."""
    return [tool["function"]["name"] for tool in tools]
