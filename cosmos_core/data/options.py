"""Options that datasets of rows share: which fields make a prompt, which rows are left out, which are held out."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data.rows import text_field


class Template:
    """A template, checked when it is made.

    Args:
        text: The template; `{{` and `}}` are braces.

    Raises:
        ValueError: It has a placeholder that is more than the name of a field.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        for literal, name, form, conversion in string.Formatter().parse(text):
            if name == "" or form or conversion:
                raise ValueError(
                    f"template {text!r}: a placeholder is the name of a field in braces, as in {{question}}"
                )
            self._parts.append((literal, name))

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields that it needs."""
        return frozenset(name for _, name in self._parts if name is not None)

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text for one row; raises BadRowError if a field is missing, or is neither text nor a number."""
        return "".join(literal + ("" if name is None else text_field(row, name)) for literal, name in self._parts)


def _is_template(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    try:
        Template(value)
    except ValueError as error:
        raise ValueError(f"{attribute.name}: {error}") from error


def _is_pattern(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{attribute.name}: {value!r} is no regular expression: {error}") from error


@attrs.frozen(kw_only=True)
class RowsOptions:
    """Options for the rows there are. A plugin's own options inherit it, and add where rows come from."""

    heldout_rows: int | None = option(
        None, help="Hold this many of the train rows out instead.", validator=check.optional(check.ge(1))
    )
    heldout_fraction: float | None = option(
        None,
        help="Hold this share of the train rows out instead.",
        validator=check.optional(check.and_(check.gt(0.0), check.lt(1.0))),
    )
    on_bad_row: Literal["refuse", "skip"] = option(
        "refuse", help="Whether a row that cannot be used is an error, or is left out and counted."
    )
    check_rows: Literal["at-start", "when-read"] = option(
        "at-start",
        help="`at-start` reads every row once in every process, so that a run with bad rows is refused or goes "
        "without them; `when-read` reads a row when it is trained on, and drops a bad one then.",
    )

    def __attrs_post_init__(self) -> None:
        if self.heldout_rows is not None and self.heldout_fraction is not None:
            raise ValueError("give at most one of `heldout_rows` and `heldout_fraction`")
        if self.on_bad_row == "skip" and self.check_rows == "when-read":
            raise ValueError(
                '`on_bad_row = "skip"` needs `check_rows = "at-start"`: rows are numbered before they are read'
            )


@attrs.frozen(kw_only=True)
class FieldOptions(RowsOptions):
    """Options for the fields that make a prompt, and for rows that are left out for their length."""

    prompt: str | None = option(
        None,
        help="Template of the prompt, `{field}` standing for a field of the row (`{{` for a brace).",
        validator=check.optional(_is_template),
    )
    messages: str | None = option(
        None,
        help="Field with the turns of a chat (`role`, `content`, and `tool_calls` and `tool_call_id` of OpenAI's API), "
        "instead of `prompt`; a last turn of the assistant is the demonstration.",
    )
    tools: str | None = option(
        None, help="Field with the tools that a chat's model may call: objects of OpenAI's API, or their JSON text."
    )
    chat: bool = option(False, help="Whether `prompt` is a user's turn, for the model's chat template.")
    system: str | None = option(None, help="A system turn to begin every chat with.")
    demonstration: str | None = option(
        None,
        help="Template of the completion to imitate, or to prefer to `rejected`.",
        validator=check.optional(_is_template),
    )
    rejected: str | None = option(
        None,
        help="Template of a completion that is worse than the demonstration, for algorithms that learn from "
        "preferences.",
        validator=check.optional(_is_template),
    )
    rejected_messages: str | None = option(
        None,
        help="Field with the turns of the rejected chat, instead of `rejected`: those of `messages` but for the last, "
        "which is the assistant's in both.",
    )
    reference: str | None = option(None, help="Field with what rewards compare a completion with.")
    reference_pattern: str | None = option(
        None,
        help="Regular expression for the part of `reference` that counts: the last group of its last match, such as "
        r"`#### (.+)`.",
        validator=check.optional(_is_pattern),
    )
    media: str | None = option(
        None,
        help="Field with the images or videos that the prompt shows: a path or URL, or a list of them; a relative path "
        "starts at the folder of the row's file.",
    )
    metadata: tuple[str, ...] = option(
        (), help="Fields that samples carry along, such as a difficulty for `curriculum` or a label for `cosmos eval`."
    )
    min_characters: int | None = option(
        None,
        help="Leave out, and count, rows of fewer characters in prompt, demonstration and rejected together.",
        validator=check.optional(check.ge(1)),
    )
    max_characters: int | None = option(
        None,
        help="Leave out, and count, rows of more characters in prompt, demonstration and rejected together; "
        "`dataset.max_prompt_units` counts in the model's own units.",
        validator=check.optional(check.ge(1)),
    )

    def __attrs_post_init__(self) -> None:
        RowsOptions.__attrs_post_init__(self)
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` (a template) or `messages` (a field with the turns of a chat)")
        if self.reference_pattern is not None and self.reference is None:
            raise ValueError("`reference_pattern` needs `reference`, the field to search in")
        if self.system is not None and self.prompt is not None and not self.chat:
            raise ValueError("`system` needs `chat = true`: a plain text prompt has no turns")
        if self.tools is not None and self.prompt is not None and not self.chat:
            raise ValueError("`tools` needs `chat = true`: a plain text prompt calls none")
        if self.rejected is not None and self.rejected_messages is not None:
            raise ValueError("give at most one of `rejected` and `rejected_messages`")
        if self.rejected_messages is not None and self.messages is None:
            raise ValueError("`rejected_messages` needs `messages`, the chat that it is compared with")
        if self.rejected is not None and self.demonstration is None and self.messages is None:
            raise ValueError("`rejected` needs `demonstration`, which is preferred to it")
        lengths = (self.min_characters, self.max_characters)
        if any(length is not None for length in lengths) and self.check_rows == "when-read":
            raise ValueError('`min_characters` and `max_characters` need `check_rows = "at-start"`')
        if None not in lengths and lengths[0] > lengths[1]:  # type: ignore[operator]  # neither is None
            raise ValueError(f"`min_characters` is {lengths[0]}, more than `max_characters`, {lengths[1]}")
