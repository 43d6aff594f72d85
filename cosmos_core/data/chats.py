"""Chats in rows: lists of turns with a role and a content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_core.data.rows import BadRowError, field
from cosmos_core.types import Message


def chat_of(row: Mapping[str, Any], name: str) -> tuple[tuple[Message, ...], str | None]:
    """The turns in field `name`, and what the assistant says in the last one; None if that is somebody else's.

    Raises:
        BadRowError: There is no such field, or it holds no chat, or nothing before the answer.
    """
    turns = _turns(field(row, name), name)
    answer = turns.pop().content if turns[-1].role == "assistant" else None
    if not turns:
        raise BadRowError(f"field {name!r} has an answer, but nothing before it")
    return tuple(turns), answer


def _turns(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRowError(f"field {name!r} is no list of turns")
    turns = []
    for number, turn in enumerate(value, 1):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        content = turn.get("content") if isinstance(turn, Mapping) else None
        if not (isinstance(role, str) and role and isinstance(content, str)):
            raise BadRowError(f"field {name!r}: turn {number} has no text for both `role` and `content`")
        turns.append(Message(role=role, content=content))
    return turns
