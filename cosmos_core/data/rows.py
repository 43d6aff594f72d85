"""Fields of a raw row, and why a row cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


class BadRowError(Exception):
    """Why a row cannot be used; whoever knows its source and place turns it into a `DataError`.

    Args:
        message: What is wrong, with the value seen.
        kind: What rows of the same fault have in common, to count them by; the message if empty.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind or message


class LeftOutError(BadRowError):
    """The row is sound, and a filter leaves it out."""


def field(row: Mapping[str, Any], name: str) -> Any:
    """The field `name` of a row.

    Raises:
        BadRowError: There is none; the message names the nearest, or all.
    """
    if name in row:
        return row[name]
    near = difflib.get_close_matches(name, list(row), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, row)) or 'none'}"
    raise BadRowError(f"no field {name!r}; {hint}", f"no field {name!r}")


def text_field(row: Mapping[str, Any], name: str) -> str:
    """The field `name` as text.

    Raises:
        BadRowError: There is none, or it is neither text nor a number.
    """
    value = field(row, name)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise BadRowError(f"field {name!r} is {_kind(value)}, not text")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
