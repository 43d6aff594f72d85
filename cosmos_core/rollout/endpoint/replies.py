"""Writes replies as OpenAI's API has them: chats and responses, whole and as events of a stream.

A reply is streamed once it is whole: what a call of a tool is can only be told at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cosmos_core.rollout.endpoint.calls import Choice, Reply
from cosmos_core.types import Message

DONE: Final = b"data: [DONE]\n\n"
"""The end of a stream of a chat."""


def chat(reply: Reply) -> dict[str, Any]:
    """A reply of `/v1/chat/completions`."""
    choices = [
        {
            "index": index,
            "message": _turn(choice.message),
            "finish_reason": choice.reason,
            "logprobs": _logprobs(choice),
        }
        for index, choice in enumerate(reply.choices)
    ]
    return {**_head(reply), "object": "chat.completion", "choices": choices, "usage": _usage(reply)}


def chat_events(reply: Reply, *, with_usage: bool) -> Iterator[bytes]:
    """The same as events of a stream."""
    for index, choice in enumerate(reply.choices):
        turn = _turn(choice.message)
        calls = turn.pop("tool_calls", [])
        yield event(chunk(reply, turn, index, logprobs=_logprobs(choice)))
        for number, call in enumerate(calls):
            yield event(chunk(reply, {"tool_calls": [{"index": number, **call}]}, index))
        yield event(chunk(reply, {}, index, reason=choice.reason))
    if with_usage:
        yield event(usage_chunk(reply))
    yield DONE


def chunk(reply: Reply, delta: Mapping[str, Any], index: int = 0, **told: Any) -> dict[str, Any]:
    """More of a choice, and the `reason` of its end or `logprobs`."""
    choice = {"index": index, "delta": delta, "finish_reason": told.get("reason"), "logprobs": told.get("logprobs")}
    return {**_head(reply), "object": "chat.completion.chunk", "choices": [choice]}


def usage_chunk(reply: Reply) -> dict[str, Any]:
    """The numbers of units, after the last choice."""
    return {**chunk(reply, {}), "choices": [], "usage": _usage(reply)}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "created": reply.created, "model": reply.model}


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if not message.tool_calls:
        turn["content"] = message.content
    else:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return {**turn, **({"reasoning_content": message.reasoning} if message.reasoning else {})}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if not choice.logprobs:
        return None
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, value in choice.logprobs
        ]
    }


def _usage(reply: Reply) -> dict[str, int]:
    given, made = reply.num_prompt_units, reply.num_units
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def response(reply: Reply, body: Mapping[str, Any], *, status: str = "completed") -> dict[str, Any]:
    """A reply of `/v1/responses` to a body."""
    choice = reply.choices[0]
    is_cut = choice.reason == "length"
    if status == "completed" and is_cut:
        status = "incomplete"
    is_over = status != "in_progress"
    given, made = reply.num_prompt_units, reply.num_units
    usage = {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + made,
    }
    asked = ("instructions", "previous_response_id", "metadata", "temperature", "top_p", "max_output_tokens")
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_over and is_cut else None,
        "model": reply.model,
        "output": _items(reply.id, choice.message) if is_over else [],
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": usage if is_over else None,
        **{key: body.get(key) for key in asked},
    }


def _items(name: str, message: Message) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thought]})
    if message.content or not message.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        said = {"role": "assistant", "status": "completed", "content": [part]}
        items.append({"type": "message", "id": f"msg_{name}", **said})
    for index, call in enumerate(message.tool_calls):
        asked = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append({"type": "function_call", "id": f"fc_{name}_{index}", **asked})
    return items


def response_events(reply: Reply, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The same as events of a stream."""
    begun, whole = response(reply, body, status="in_progress"), response(reply, body)
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        events += _events_of(index, item)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, told in enumerate(events):
        yield b"event: %s\n" % told["type"].encode() + event({**told, "sequence_number": number})


def _events_of(index: int, item: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    place = {"output_index": index, "item_id": item["id"]}
    added = {"type": "response.output_item.added", "output_index": index}
    done = {"type": "response.output_item.done", "output_index": index, "item": item}
    if item["type"] == "function_call":
        called = "response.function_call_arguments"
        return [
            {**added, "item": {**item, "arguments": "", "status": "in_progress"}},
            {"type": f"{called}.delta", **place, "delta": item["arguments"]},
            {"type": f"{called}.done", **place, "arguments": item["arguments"], "name": item["name"]},
            done,
        ]
    if item["type"] == "reasoning":
        return [{**added, "item": item}, done]
    (part,) = item["content"]
    place["content_index"] = 0
    return [
        {**added, "item": {**item, "content": [], "status": "in_progress"}},
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        done,
    ]


def event(data: Mapping[str, Any]) -> bytes:
    """An event of a stream."""
    return b"data: %s\n\n" % json.dumps(data).encode()
