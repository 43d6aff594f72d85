"""Plain data as YAML: block style, strings in the double quotes that JSON shares with YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

Plain: TypeAlias = "Mapping[str, Plain] | Sequence[Plain] | str | int | bool"


def documents(*data: Plain) -> str:
    """Several documents, as one text."""
    return "".join("---\n" + "\n".join(_lines(each)) + "\n" for each in data)


def _lines(data: Plain) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _entry(f"{key}:", value)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for value in data:
            lines = _lines(value)
            yield f"- {next(lines)}"
            yield from (f"  {line}" if line else "" for line in lines)
    else:
        yield json.dumps(data)


def _entry(key: str, value: Plain) -> Iterator[str]:
    if isinstance(value, str):
        if _reads_well(value):
            yield f"{key} |{'' if value.endswith(chr(10)) else '-'}"
            yield from (f"  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
            return
        yield f"{key} {json.dumps(value)}"
    elif isinstance(value, Mapping | Sequence) and value:
        yield key
        yield from (f"  {line}" if line else "" for line in _lines(value))
    else:
        yield f"{key} {json.dumps(value)}"


def _reads_well(text: str) -> bool:
    """Whether text of several lines survives as a block, which loses some kinds of white space."""
    lines = text.split("\n")
    is_plain = all(line == line.rstrip() and line.isprintable() for line in lines)
    return "\n" in text and is_plain and not text[0].isspace() and not text.endswith("\n\n")
