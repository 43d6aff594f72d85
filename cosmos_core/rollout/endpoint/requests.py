"""Reads bodies of `/v1/chat/completions` and `/v1/responses` as calls; the others are refused by a sentence.

How replies are drawn is the run's: `temperature`, `top_p`, `top_k` and `seed` of a request change nothing, for what is
trained on has to be drawn as the recipe says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from cosmos_core.errors import DataError
from cosmos_core.rollout.endpoint.calls import Call, CallError
from cosmos_core.rollout.endpoint.images import image_of
from cosmos_core.types import JSON, Message, ToolCall
from cosmos_core.types.tools import read_tools

_MOST: Final = 128
"""Choices of a call."""
_OF_THE_RUN: Final = ("temperature", "top_p", "top_k", "min_p", "seed")
_OF_A_SERVICE: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "include", "background")
_WITHOUT_EFFECT: Final = frozenset(
    {
        *(*_OF_THE_RUN, *_OF_A_SERVICE, "stream", "stream_options", "prompt_cache_key", "prompt_cache_retention"),
        *(
            "parallel_tool_calls",
            "max_tool_calls",
            "verbosity",
            "reasoning",
            "reasoning_effort",
            "prediction",
            "truncation",
        ),
    }
)
_DEFAULTS: Final[Mapping[str, Sequence[Any]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Keys that are taken with these values, which ask for nothing."""
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Turn(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class _Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    tools: list[dict[str, Any]] = []


class _ChatAsked(_Asked, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST)] = 1
    stop: str | list[Annotated[str, msgspec.Meta(min_length=1)]] = ""
    logprobs: bool = False


class _ResponseAsked(_Asked, kw_only=True, forbid_unknown_fields=True):
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    instructions: str = ""
    previous_response_id: str = ""
    max_output_tokens: _Positive | None = None


class Streaming(msgspec.Struct):
    """Options of how a reply is sent."""

    stream: bool = False
    include_usage: bool = False


def read_body(body: bytes) -> dict[str, Any]:
    """A body as JSON; raises CallError if it is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(400, f"the body is no JSON object: {error}") from error


def streaming(body: Mapping[str, Any]) -> Streaming:
    """Say whether a body asks for a stream; raises CallError where that cannot be told."""
    options = body.get("stream_options") or {}
    usage = options.get("include_usage") if isinstance(options, Mapping) else options
    given = {"stream": body.get("stream") or False, "include_usage": usage or False}
    try:
        return msgspec.convert(given, Streaming)
    except msgspec.ValidationError as error:
        raise CallError(400, f"stream, stream_options: {error}", param="stream") from error


def read_chat(body: Mapping[str, Any]) -> Call:
    """The call of a body of `/v1/chat/completions`; raises CallError if it is none, or asks for what there is not."""
    asked = _converted(body, _ChatAsked)
    stops = asked.stop if isinstance(asked.stop, list) else [asked.stop] if asked.stop else []
    return Call(
        model=asked.model,
        messages=tuple(_message(turn, f"messages[{index}]") for index, turn in enumerate(asked.messages)),
        tools=_tools(asked.tools),
        may_call=body.get("tool_choice") != "none",
        max_units=asked.max_completion_tokens or asked.max_tokens,
        stops=tuple(stops),
        num_choices=asked.n,
        with_logprobs=asked.logprobs,
    )


def read_response(body: Mapping[str, Any]) -> Call:
    """The call of a body of `/v1/responses`; raises CallError if it is none, or asks for what there is not."""
    asked = _converted(body, _ResponseAsked)
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    tools: list[Mapping[str, JSON]] = []
    for tool in asked.tools:
        if tool.get("type") != "function":
            words = f"tools: {tool.get('type')!r} is a tool of OpenAI's own; only functions are called here"
            raise CallError(400, words, param="tools")
        tools.append({"type": "function", "function": {key: tool.get(key) for key in _OF_TOOLS}})
    return Call(
        model=asked.model,
        messages=tuple(_joined(items)),
        tools=_tools(tools),
        may_call=body.get("tool_choice") != "none",
        instructions=asked.instructions,
        previous=asked.previous_response_id,
        max_units=asked.max_output_tokens,
    )


_OF_TOOLS: Final = ("name", "description", "parameters")


def _converted(body: Mapping[str, Any], kind: Any) -> Any:
    told = {key: value for key, value in body.items() if value is not None and key not in _WITHOUT_EFFECT}
    if isinstance(text := told.get("text"), Mapping):
        told["text"] = {key: each for key, each in text.items() if each is not None and key not in _WITHOUT_EFFECT}
    told = {key: value for key, value in told.items() if value not in _DEFAULTS.get(key, ())}
    if unknown := [key for key in told if key in _DEFAULTS]:
        what = f"{unknown[0]}: {told[unknown[0]]!r:.80} cannot be done here; leave it out"
        raise CallError(400, what, param=unknown[0], code="unsupported_value")
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        named = re.search(r"unknown field `([^`]+)`|`\$\.(\w+)", str(error))
        param = named and (named[1] or named[2])
        raise CallError(400, f"the request cannot be read: {error}", param=param) from error


def _tools(tools: Sequence[Mapping[str, JSON]]) -> tuple[Mapping[str, JSON], ...]:
    try:
        return read_tools([{key: _given(each) for key, each in tool.items()} for tool in tools])
    except DataError as error:
        raise CallError(400, str(error), param="tools") from error


def _given(value: Any) -> Any:
    """A table without what is null: clients write it for what they leave out."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else value


def _message(turn: _Turn, where: str) -> Message:
    if turn.function_call is not None:
        raise CallError(400, f"{where}.function_call: calls of functions are in `tool_calls`", param="messages")
    said = {"content": _words(turn.content, where)} if turn.role == "assistant" else _content(turn.content, where)
    return Message(
        role="system" if turn.role == "developer" else turn.role,
        **said,
        tool_calls=tuple(
            ToolCall(name=call.function.name, arguments=call.function.arguments, id=call.id)
            for call in turn.tool_calls or ()
        ),
        tool_call_id=turn.tool_call_id or "",
        reasoning=turn.reasoning_content or "",
    )


def _content(content: Any, where: str, param: str = "messages") -> dict[str, Any]:
    """Words of a turn, the images that it shows, and where these stand: fields of a `Message`."""
    if content is None or isinstance(content, str):
        return {"content": content or ""}
    words, media, places = "", [], []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image_url", "input_image"):
            media.append(image_of(part, where, param))
            places.append(len(words))
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            what = f"{where}: a part of type {kind!r}; only text and images can be read here"
            raise CallError(400, what, param=param)
        words += text
    return {"content": words, "media": tuple(media), "places": tuple(places)}


def _words(content: Any, where: str) -> str:
    """The words of the model's own turn, which shows nothing."""
    read = _content(content, where)
    if read.get("media"):
        raise CallError(400, f"{where}: the model's own turn has an image; show it in another's", param="messages")
    words: str = read["content"]
    return words


def _joined(items: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """The messages of items: a turn of the model's is one, with all that it said and called."""
    text: list[str] = []
    calls: list[ToolCall] = []
    is_open = False
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type", "message")
        role = item.get("role", "user") if kind == "message" else ""
        if kind == "reasoning":
            continue  # what a model thought is recorded; it needs not be sent back
        if role == "assistant":
            text.append(_words(item.get("content"), where))
            is_open = True
        elif kind == "function_call":
            calls.append(
                ToolCall(
                    name=_string(item, "name", where),
                    arguments=_string(item, "arguments", where),
                    id=_string(item, "call_id", where),
                )
            )
            is_open = True
        else:
            if is_open:
                yield Message(role="assistant", content="".join(text), tool_calls=tuple(calls))
                text, calls, is_open = [], [], False
            yield _other(item, kind, role, where)
    if is_open:
        yield Message(role="assistant", content="".join(text), tool_calls=tuple(calls))


def _other(item: Mapping[str, Any], kind: str, role: str, where: str) -> Message:
    if kind == "function_call_output":
        said = _content(item.get("output"), where, "input")
        return Message(role="tool", **said, tool_call_id=_string(item, "call_id", where))
    if kind != "message" or not isinstance(role, str):
        raise CallError(400, f"{where}: an item of type {kind!r}, which cannot be read here", param="input")
    return Message(role="system" if role == "developer" else role, **_content(item.get("content"), where, "input"))


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise CallError(400, f"{where}.{key}: expected a string, got {value!r:.80}", param="input")
    return value
