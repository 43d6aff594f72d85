"""Formats in which models call tools, by name: each reads a turn as text, special tokens in it.

transformers' own readers by declared templates give a turn up at the first call that is no JSON, and lose the text of
arguments. These keep both: a call that cannot be read stays in the content, with a sentence of what is wrong.

Sources: the chat templates of NousResearch/Hermes-3 and Qwen3 (`hermes`), Llama 3.1 to 3.3 (`llama3`), DeepSeek V3, R1
and V3.1 (`deepseek`), gpt-oss and https://cookbook.openai.com/articles/openai-harmony (`harmony`), Qwen3-Coder
(`qwen3-coder`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs

from cosmos_core.models.weights.loading import LIBRARY_ERRORS
from cosmos_core.types import ToolCall
from cosmos_core.types.tools import TOOL_NAME, loads

FormatName: TypeAlias = Literal["auto", "hermes", "llama3", "deepseek", "harmony", "qwen3-coder", "none"]
REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn under which chat templates look for its reasoning."""
THINK: Final = "<think>"
_THOUGHT: Final = "</think>"


@attrs.frozen(kw_only=True)
class Parsed:
    """A turn as a format reads it (see `cosmos_core.protocols.model.ReadTurn`)."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str = ""


@attrs.frozen(kw_only=True)
class _Block:
    """A part of a turn that may be a call: where it lies in the text, and the call, or a reason why it is none."""

    start: int
    end: int
    found: tuple[ToolCall, ...] | str


Tools: TypeAlias = Sequence[Mapping[str, Any]]
Blocks: TypeAlias = Iterator[_Block]


def parse(name: str, text: str, *, tools: Tools, ended: bool, is_thinking: bool = False) -> Parsed:
    """Read a turn.

    Args:
        name: Of the format, as `find_format` gives it.
        text: The turn, special tokens in it, without the stop token that ended it.
        tools: The tools that may be called; without any, nothing is a call.
        ended: Whether a stop token ended it.
        is_thinking: Whether the template has opened the model's reasoning.
    """
    if name == "harmony":
        return _harmony(text, tools=tools, ended=ended)
    reasoning, said = _split_reasoning(text, is_thinking=is_thinking)
    if not tools or name == "none":
        return Parsed(content=said, reasoning=reasoning)
    return _cut_out(said, list(_READERS[name](said, tools)), reasoning, len(text) - len(said))


def parse_by_template(tokenizer: Any, template: Mapping[str, Any], text: str, tools: Tools, before: str) -> Parsed:
    """Read a turn as a tokenizer itself declares (`response_template` of transformers).

    It reads all of a turn or nothing, and has the values of arguments, not their text.
    """
    try:
        found = tokenizer.parse_response(text, dict(template), prefix=before, tools=[dict(tool) for tool in tools])
        functions = [each["function"] for each in found.get("tool_calls") or ()]
        read = [_call(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions]
    except LIBRARY_ERRORS as error:
        return Parsed(content=text, malformed=(f"the tokenizer's response template cannot read the turn: {error}",))
    if wrong := tuple(each for each in read if isinstance(each, str)):
        return Parsed(content=text, malformed=wrong)
    reasoning = next((found[key] for key in REASONING_KEYS if found.get(key)), "")
    calls = tuple(call for each in read for call in each if isinstance(call, ToolCall))
    return Parsed(content=str(found.get("content") or ""), calls=calls, reasoning=str(reasoning))


def find_format(template: str, vocabulary: Mapping[str, int]) -> str:
    """The format of a chat template and, where that names none, of the tokens of a tokenizer."""
    for text in (template, vocabulary):
        for name, marks in _MARKS.items():
            if all(mark in text for mark in marks):
                return name
    return "none"


_MARKS: Final = {
    "none": ("<arg_key>",),  # GLM's, which has the tags of others
    "harmony": ("<|channel|>", "<|call|>"),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "qwen3-coder": ("<tool_call>", "<function="),
    "hermes": ("<tool_call>",),
    "llama3": ("<|python_tag|>",),
}
"""Signs of each format in a chat template, or among tokens; the first that fits."""


def _split_reasoning(text: str, *, is_thinking: bool) -> tuple[str, str]:
    begun = text.lstrip()
    if begun.startswith(THINK):
        begun = begun[len(THINK) :]
    elif not is_thinking:
        return "", text
    reasoning, _, said = begun.partition(_THOUGHT)
    return reasoning.strip(), said.lstrip("\n")


def _cut_out(text: str, blocks: Sequence[_Block], reasoning: str, offset: int) -> Parsed:
    calls: list[ToolCall] = []
    malformed, content, place, number = [], "", 0, 0
    for block in blocks:
        number += bool(block.found)
        if isinstance(block.found, str):
            malformed.append(f"tool call {number}, at character {offset + block.start} of the turn: {block.found}")
            continue
        calls += block.found
        content += text[place : block.start]
        place = block.end
    content += text[place:]
    return Parsed(
        content=content.strip() if calls else content,
        calls=tuple(calls),
        malformed=tuple(malformed),
        reasoning=reasoning,
    )


def _call(name: Any, arguments: str | None) -> tuple[ToolCall] | str:
    """The call, or why it is none."""
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        return f"{name!r:.80} is no name of a tool" if name is not None else "it names no tool"
    try:
        value = loads(arguments) if arguments is not None else {}
    except (ValueError, RecursionError) as error:
        return f"the arguments of {name} are no JSON: {error}"
    if not isinstance(value, dict):
        return f"the arguments of {name} are {arguments!r:.80}, no JSON object"
    return (ToolCall(name=name, arguments="{}" if arguments is None else arguments),)


_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def _skip(text: str, place: int, sign: str = "") -> int:
    """The place behind white space and a sign."""
    space = _SPACE.match(text, place)
    place = space.end() if space else place
    if not text.startswith(sign, place):
        raise json.JSONDecodeError(f"Expecting {sign!r}", text, place)
    return place + len(sign)


def _members(text: str, place: int) -> tuple[dict[str, str], int]:
    """The texts of the values of a JSON object that begins at `place`, by key, and where it ends; else a ValueError."""
    found: dict[str, str] = {}
    place = _skip(text, _skip(text, place, "{"))
    while not text.startswith("}", place):
        key, place = _DECODER.raw_decode(text, _skip(text, _skip(text, place, "," if found else "")))
        start = _skip(text, _skip(text, place, ":"))
        _, end = _DECODER.raw_decode(text, start)
        found[key if isinstance(key, str) else ""] = text[start:end]
        place = _skip(text, end)
    return found, place + 1


def _of_json(text: str, place: int = 0, *, alone: bool = True) -> tuple[tuple[ToolCall] | str, int]:
    """The call that a JSON object names, or why it is none, and where the object ends."""
    try:
        members, end = _members(text, place)
        if alone and text[end:].strip():
            raise json.JSONDecodeError("Extra data", text, end)
        name = loads(members["name"]) if "name" in members else None
    except (ValueError, TypeError, RecursionError) as error:
        return f"it is no JSON object: {error}", len(text)
    return _call(name, members.get("arguments", members.get("parameters"))), end


_TAGGED: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def _hermes(text: str, tools: Tools) -> Blocks:  # noqa: ARG001 - as the others
    for match in _TAGGED.finditer(text):
        found = _of_json(match[1].strip())[0] if match[2] else "it is cut before </tool_call>"
        yield _Block(start=match.start(), end=match.end(), found=found)


_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>((?:(?!</parameter>).)*)</parameter>", re.DOTALL)
_FUNCTION: Final = re.compile(rf"\s*<function=([^>\n]*)>((?:\s*{_PARAMETER.pattern})*)\s*</function>\s*", re.DOTALL)


def _qwen3_coder(text: str, tools: Tools) -> Blocks:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    for match in _TAGGED.finditer(text):
        inner = _FUNCTION.fullmatch(match[1])
        if inner is None:
            found: tuple[ToolCall, ...] | str = (
                "it has no <function=…> with <parameter=…> in it" if match[2] else "it is cut before </tool_call>"
            )
        else:
            types = schemas.get(inner[1], {}).get("properties") or {}
            values = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(inner[2])}
            found = _call(inner[1], json.dumps(values, ensure_ascii=False))
        yield _Block(start=match.start(), end=match.end(), found=found)


def _typed(text: str, schema: Any) -> Any:
    """A value as its schema wants it; text where that says nothing else, or the text is no such value."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds is None or "string" in ([kinds] if isinstance(kinds, str) else kinds):
        return text
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


_PYTHON: Final = "<|python_tag|>"
_ARGUMENTS: Final = re.compile(r'"(?:parameters|arguments)"\s*:')


def _llama3(text: str, tools: Tools) -> Blocks:  # noqa: ARG001 - as the others
    """A turn that is JSON objects, `;` between them, and nothing else; others may be JSON, too, and no calls."""
    place = len(text) - len(text.lstrip())
    is_marked = text.startswith(_PYTHON, place)
    place += len(_PYTHON) if is_marked else 0
    blocks, named = [], is_marked or _ARGUMENTS.search(text) is not None
    while place < len(text) and (rest := text[place:].strip(" \t\r\n;")):
        start = text.index(rest, place)
        found, end = _of_json(text, start, alone=False)
        blocks.append(_Block(start=start, end=end, found=found))
        place = end
    if blocks and named and all(not isinstance(block.found, str) for block in blocks):
        # What stands between them goes, too.
        calls = tuple(call for block in blocks for call in block.found if isinstance(call, ToolCall))
        yield _Block(start=0, end=len(text), found=calls)
    elif named:
        yield from (attrs.evolve(b, start=0, end=len(text)) for b in blocks if isinstance(b.found, str))


_DEEPSEEK: Final = re.compile(
    r"<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>|<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|\Z)", re.DOTALL
)
_FENCED: Final = re.compile(r"\s*(\S*)\s*\n```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


def _deepseek(text: str, tools: Tools) -> Blocks:  # noqa: ARG001 - as the others
    for match in _DEEPSEEK.finditer(text):
        head, separator, tail = (match[1] or "").partition("<｜tool▁sep｜>")
        fenced = _FENCED.fullmatch(tail)
        found: tuple[ToolCall, ...] | str = ()
        if match[1] is None:
            pass  # what stands round calls
        elif not match[2]:
            found = "it is cut before <｜tool▁call▁end｜>"
        elif not separator:
            found = "it has no <｜tool▁sep｜>"
        elif fenced:  # V3, R1: function, then name and arguments
            found = _call(fenced[1], fenced[2])
        else:  # V3.1: name, then arguments
            found = _call(head.strip(), tail)
        yield _Block(start=match.start(), end=match.end(), found=found)


_READERS: Final[Mapping[str, Callable[[str, Tools], Blocks]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "deepseek": _deepseek,
    "qwen3-coder": _qwen3_coder,
}

_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_BODY: Final = "<|message|>"
_END: Final = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")


def _harmony(text: str, *, tools: Tools, ended: bool) -> Parsed:
    """A turn of messages, each with a channel: analysis is reasoning, commentary and final are said."""
    parts: dict[str, list[str]] = {"analysis": [], "said": []}
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for start, end, header, body, is_closed in _messages(text, ended=ended):
        recipient = _RECIPIENT.search(header)
        if recipient is None or not tools:
            parts["analysis" if "<|channel|>analysis" in header else "said"].append(body)
            continue
        kind, _, name = recipient[1].partition(".")
        found = _call(name, body) if is_closed else "it is cut before <|call|>"
        if kind != "functions":
            found = f"it is for {recipient[1]!r:.80}, and tools are functions.NAME"
        if isinstance(found, str):
            number = len(calls) + len(malformed) + 1
            malformed.append(f"tool call {number}, at character {start} of the turn: {found}")
            parts["said"].append(text[start:end])
        else:
            calls += found
    said, reasoning = "\n".join(filter(None, parts["said"])), "\n".join(parts["analysis"]).strip()
    return Parsed(content=said, calls=tuple(calls), malformed=tuple(malformed), reasoning=reasoning)


def _messages(text: str, *, ended: bool) -> Iterator[tuple[int, int, str, str, bool]]:
    """The messages of a turn: where each starts and ends, its header and body, and whether it is closed."""
    start = 0
    while start < len(text):
        middle = text.find(_BODY, start)
        if middle < 0:
            # A header that is cut, or what does not keep to the format.
            is_header = text.startswith(("<|start|>", "<|channel|>"), start)
            yield start, len(text), *((text[start:], "") if is_header else ("", text[start:])), False
            return
        close = _END.search(text, middle + len(_BODY))
        stop, end = close.span() if close else (len(text), len(text))
        yield start, end, text[start:middle], text[middle + len(_BODY) : stop], end > stop or (not close and ended)
        start = end


assert {*_READERS, "harmony", "none", "auto"} == {*get_args(FormatName)}
