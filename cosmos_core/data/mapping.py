"""Makes prompts of raw rows, as the options say."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from cosmos_core.data.options import FieldOptions, Template
from cosmos_core.data.rows import BadRowError, LeftOutError, field, locations
from cosmos_core.errors import DataError
from cosmos_core.types import JSON, Message, Prompt
from cosmos_core.types.tools import loads, read_messages, read_tools

_LIKENESS: Final = 0.8
"""Finds `questions` where the column is `question`; `Summarize` is a prompt beside a column `summary`."""
_PLAIN: Final = ("messages", "rejected_messages", "tools", "reference", "media")
"""Options that name one field."""
_WORD: Final = re.compile(r"\s*[\w-]+\s*")


def chat_of(row: Mapping[str, Any], name: str) -> tuple[tuple[Message, ...], str | None]:
    """The turns in field `name`, and what the assistant says in the last one; None if that is somebody else's.

    Raises:
        BadRowError: There is no such field, or it holds no chat, or nothing before the answer.
    """
    value = field(row, name)
    if not isinstance(value, list) or not value:
        raise BadRowError(f"field {name!r} is no list of turns")
    turns = list(_read(read_messages, value, name))
    last = turns.pop() if turns[-1].role == "assistant" else None
    if last is not None and last.tool_calls:
        raise BadRowError(f"field {name!r} ends with a call of a tool; a demonstration is text: leave that turn out")
    if not turns:
        raise BadRowError(f"field {name!r} has an answer, but nothing before it")
    return tuple(turns), None if last is None else last.content


def tools_of(row: Mapping[str, Any], name: str) -> tuple[Mapping[str, JSON], ...]:
    """The tools in field `name`, a list of OpenAI's objects or the JSON text of one; none where it is null.

    Raises:
        BadRowError: There is no such field, or it holds something else.
    """
    value = field(row, name)
    try:
        value = loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"field {name!r} is no JSON: {error}") from error
    tools: tuple[Mapping[str, JSON], ...] = () if value is None else _read(read_tools, value, name)
    return tools


def _read(read: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return read(value)
    except DataError as error:
        raise BadRowError(f"field {name!r}: {error}") from error


class RowMapping(Protocol):
    """Makes prompts of rows."""

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """Make the prompt of a row.

        Args:
            row: As its source has it.
            folder: Of that source, where relative paths of media start.

        Raises:
            BadRowError: The row cannot be used, or is left out, and why.
        """
        ...


class FieldMapping:
    """The mapping of `FieldOptions`.

    Attributes:
        fields: The fields to read of a row; all if empty.
    """

    def __init__(self, options: FieldOptions) -> None:
        self._options = options
        given = {"prompt": options.prompt, "demonstration": options.demonstration, "rejected": options.rejected}
        self._templates = {name: Template(text) for name, text in given.items() if text is not None}
        plain = (getattr(options, name) for name in _PLAIN)
        named = {*plain, *options.metadata}
        filled = [template.fields for template in self._templates.values()]
        self._varying = frozenset(name for name in named if name is not None).union(*filled)
        self._unchecked = {name: str(given[name]) for name, each in self._templates.items() if not each.fields}
        is_any_column = not self._varying or any(map(_WORD.fullmatch, self._unchecked.values()))
        self.fields = frozenset[str]() if is_any_column else self._varying.union(self._unchecked.values())
        self._pattern = None if options.reference_pattern is None else re.compile(options.reference_pattern)

    def prompt(self, row: Any, folder: Path) -> Prompt:
        """Make the prompt of a row (see `RowMapping`).

        Raises:
            BadRowError: The row cannot be used, or is left out, and why.
            DataError: The options make every row the same text.
        """
        if not isinstance(row, Mapping):
            raise BadRowError(f"a row is an object of named fields, not a {type(row).__name__}")
        self._check_plain(row)
        try:
            return self._made(row, folder)
        except BadRowError as error:
            if error.missing:
                names = [name for name, template in self._templates.items() if error.missing in template.fields]
                names += [name for name in _PLAIN if getattr(self._options, name) == error.missing]
                error.option = (names or ["metadata"])[0]
            raise

    def _made(self, row: Mapping[str, Any], folder: Path) -> Prompt:
        options = self._options
        text, demonstration = self._text(row)
        if "demonstration" in self._templates:
            demonstration = _not_blank(self._templates["demonstration"].fill(row), "the demonstration")
        rejected = self._rejected_of(row, text)
        if rejected is not None and demonstration is None:
            raise BadRowError("there is a rejected completion, but no demonstration that is preferred to it")
        if rejected is not None and demonstration == rejected:
            raise BadRowError("the rejected completion is the demonstration itself")
        self._check_length(text, demonstration, rejected)
        return Prompt(
            text=text,
            reference=self._reference(row),
            demonstration=demonstration,
            rejected=rejected,
            media=() if options.media is None else locations(row, options.media, folder),
            tools=() if options.tools is None else tools_of(row, options.tools),
            metadata={name: plain(field(row, name), name) for name in options.metadata},
        )

    def _check_plain(self, row: Mapping[str, Any]) -> None:
        """Raise DataError if a template without a placeholder is meant as a column, or leaves all rows alike.

        The first row tells of all.
        """
        for name, text in self._unchecked.items():
            said = text.strip()
            near = difflib.get_close_matches(said, list(row), n=1, cutoff=_LIKENESS)
            # Beside media a prompt may well be one word for all rows.
            is_loose = _WORD.fullmatch(text) and (name != "prompt" or self._options.media is None)
            if not self._varying or (near and (near[0] == said or is_loose)):
                hint = f"did you mean {{{near[0]}}}?" if near else "a column is written in braces, as in {question}."
                hint += f" If not, add a mark, as in {said + '.'!r}." if near and self._varying else ""
                raise DataError(
                    f"dataset option {name} = {text!r} is the same text in every row; {hint} Columns: {', '.join(row)}"
                )
        self._unchecked = {}

    def _text(self, row: Mapping[str, Any]) -> tuple[str | tuple[Message, ...], str | None]:
        """The prompt, and the demonstration if the chat ends with one."""
        if "prompt" in self._templates:
            text = _not_blank(self._templates["prompt"].fill(row), "the prompt")
            if not self._options.chat:
                return text, None
            return (*self._system(), Message(role="user", content=text)), None
        assert self._options.messages is not None
        turns, answer = chat_of(row, self._options.messages)
        return (*self._system(), *turns), answer

    def _system(self) -> tuple[Message, ...]:
        return () if self._options.system is None else (Message(role="system", content=self._options.system),)

    def _rejected_of(self, row: Mapping[str, Any], text: str | tuple[Message, ...]) -> str | None:
        if "rejected" in self._templates:
            return _not_blank(self._templates["rejected"].fill(row), "the rejected completion")
        name = self._options.rejected_messages
        if name is None:
            return None
        turns, answer = chat_of(row, name)
        if answer is None:
            raise BadRowError(f"field {name!r} does not end with a turn of the assistant")
        if (*self._system(), *turns) != text:
            raise BadRowError(f"field {name!r} is another chat than {self._options.messages!r} before its last turn")
        return _not_blank(answer, "the rejected completion")

    def _check_length(self, text: str | Sequence[Message], *completions: str | None) -> None:
        least, most = self._options.min_characters, self._options.max_characters
        turns = [text] if isinstance(text, str) else [turn.content for turn in text]
        length = sum(len(part) for part in (*turns, *completions) if part is not None)
        if least is not None and length < least:
            raise LeftOutError(f"{length} characters are fewer than min_characters, {least}", "below min_characters")
        if most is not None and length > most:
            raise LeftOutError(f"{length} characters are more than max_characters, {most}", "above max_characters")

    def _reference(self, row: Mapping[str, Any]) -> JSON:
        name = self._options.reference
        if name is None:
            return None
        value = plain(field(row, name), name)
        if value is None:
            raise BadRowError(f"field {name!r} is null, and rewards need a reference")
        if self._pattern is None:
            return value
        matches = list(self._pattern.finditer(str(value)))
        found = matches[-1].group(self._pattern.groups) if matches else ""
        if not found or not found.strip():
            raise BadRowError(f"field {name!r} has nothing that reference_pattern {self._pattern.pattern!r} finds")
        return found.strip()


def plain(value: Any, name: str) -> JSON:
    """The value of a field, if JSON can hold it and all that is in it.

    Raises:
        BadRowError: It is something else, such as a date, bytes or NaN, or has such in it.
    """
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part
        elif isinstance(part, float) and not math.isfinite(part):
            raise BadRowError(f"field {name!r} {_has(part, value)} {part}, which JSON cannot hold")
        elif part is not None and not isinstance(part, bool | int | float | str):
            raise BadRowError(f"field {name!r} {_has(part, value)} a {type(part).__name__}, which JSON cannot hold")
    found: JSON = value
    return found


def _has(part: Any, value: Any) -> str:
    return "is" if part is value else "has in it"


def _not_blank(text: str, what: str) -> str:
    if not text.strip():
        raise BadRowError(f"{what} is empty")
    return text
