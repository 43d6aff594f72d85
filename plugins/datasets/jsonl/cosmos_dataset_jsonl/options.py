"""Options of `jsonl`."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_dataset_jsonl.template import Template


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
class JsonlOptions:
    """Which files, how their rows become prompts, and which rows are held out."""

    train: str = option(
        help="File of the train split, `.jsonl` or `.parquet`; a glob takes several, in order of their names. "
        "`${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the recipe."
    )
    heldout: str | None = option(None, help="File or glob of the held-out split.")
    heldout_rows: int | None = option(
        None, help="Hold this many rows of `train` out instead.", validator=check.optional(check.ge(1))
    )
    heldout_fraction: float | None = option(
        None,
        help="Hold this share of the rows of `train` out instead.",
        validator=check.optional(check.and_(check.gt(0.0), check.lt(1.0))),
    )
    prompt: str | None = option(
        None,
        help="Template of the prompt, `{field}` standing for a field of the row (`{{` for a brace).",
        validator=check.optional(_is_template),
    )
    messages: str | None = option(
        None,
        help="Field with the turns of a chat (`role`, `content`), instead of `prompt`; a last turn of the assistant "
        "is the demonstration.",
    )
    chat: bool = option(False, help="Whether `prompt` is a user's turn, for the model's chat template.")
    system: str | None = option(None, help="A system turn to begin every chat with.")
    demonstration: str | None = option(
        None, help="Template of the completion to imitate.", validator=check.optional(_is_template)
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
    on_bad_row: Literal["refuse", "skip"] = option(
        "refuse", help="Whether a row that cannot be used is an error, or is left out and counted."
    )

    def __attrs_post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` (a template) or `messages` (a field with the turns of a chat)")
        if sum(choice is not None for choice in (self.heldout, self.heldout_rows, self.heldout_fraction)) > 1:
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")
        if self.reference_pattern is not None and self.reference is None:
            raise ValueError("`reference_pattern` needs `reference`, the field to search in")
        if self.system is not None and self.prompt is not None and not self.chat:
            raise ValueError("`system` needs `chat = true`: a plain text prompt has no turns")
