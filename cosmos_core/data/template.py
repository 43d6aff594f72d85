"""Prompt templates: `{field}` stands for a field of the row, and nothing else is special."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

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
        """The text for one row.

        Raises:
            BadRowError: A field is missing, or is neither text nor a number.
        """
        return "".join(literal + ("" if name is None else text_field(row, name)) for literal, name in self._parts)
