"""From a raw row to a prompt, as the options say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmos_core.types import JSON, Message, Prompt
from cosmos_dataset_jsonl.media import locations
from cosmos_dataset_jsonl.options import JsonlOptions
from cosmos_dataset_jsonl.rows import BadRowError, field
from cosmos_dataset_jsonl.template import Template


class RowMapping:
    """The field mapping of one recipe."""

    def __init__(self, options: JsonlOptions) -> None:
        self._options = options
        self._prompt = None if options.prompt is None else Template(options.prompt)
        self._demonstration = None if options.demonstration is None else Template(options.demonstration)
        self._pattern = None if options.reference_pattern is None else re.compile(options.reference_pattern)

    @property
    def fields(self) -> frozenset[str]:
        """Every field that a row must have."""
        templates = [template for template in (self._prompt, self._demonstration) if template is not None]
        named = {
            name for name in (self._options.messages, self._options.reference, self._options.media) if name is not None
        }
        return frozenset(named).union(*(template.fields for template in templates))

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """Make the prompt of a row.

        Args:
            row: As its file has it.
            folder: Of that file, where relative paths of media start.

        Raises:
            BadRowError: The row cannot be used, and why.
        """
        if not isinstance(row, Mapping):
            raise BadRowError(f"a row is an object of named fields, not a {type(row).__name__}")
        text, demonstration = self._text(row)
        if self._demonstration is not None:
            demonstration = _not_blank(self._demonstration.fill(row), "the demonstration")
        media = () if self._options.media is None else locations(row, self._options.media, folder)
        return Prompt(text=text, reference=self._reference(row), demonstration=demonstration, media=media)

    def _text(self, row: Mapping[str, Any]) -> tuple[str | tuple[Message, ...], str | None]:
        """The prompt, and the demonstration if the chat ends with one."""
        if self._prompt is not None:
            text = _not_blank(self._prompt.fill(row), "the prompt")
            if not self._options.chat:
                return text, None
            return (*self._system(), Message(role="user", content=text)), None
        assert self._options.messages is not None
        turns = _turns(field(row, self._options.messages), self._options.messages)
        answer = turns.pop().content if turns[-1].role == "assistant" else None
        if not turns:
            raise BadRowError(f"field {self._options.messages!r} has an answer, but nothing before it")
        return (*self._system(), *turns), answer

    def _system(self) -> tuple[Message, ...]:
        return () if self._options.system is None else (Message(role="system", content=self._options.system),)

    def _reference(self, row: Mapping[str, Any]) -> JSON:
        name = self._options.reference
        if name is None:
            return None
        value: JSON = field(row, name)
        if value is None:
            raise BadRowError(f"field {name!r} is null, and rewards need a reference")
        if not isinstance(value, bool | int | float | str | list | dict):
            raise BadRowError(f"field {name!r} is a {type(value).__name__}, which JSON cannot hold")
        return value if self._pattern is None else _last_group(self._pattern, str(value), name)


def _last_group(pattern: re.Pattern[str], text: str, name: str) -> str:
    matches = list(pattern.finditer(text))
    found = None if not matches else matches[-1].group(pattern.groups)
    if not found or not found.strip():
        raise BadRowError(f"field {name!r} has nothing that reference_pattern {pattern.pattern!r} finds")
    return found.strip()


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


def _not_blank(text: str, what: str) -> str:
    if not text.strip():
        raise BadRowError(f"{what} is empty")
    return text
