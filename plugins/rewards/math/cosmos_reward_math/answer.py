"""The place of the answer in a text."""

from __future__ import annotations

from typing import Final

MARKER: Final = "####"


def after_marker(text: str) -> str | None:
    """The rest of the line after the last `####`, stripped; None without a marker."""
    _, marker, rest = text.rpartition(MARKER)
    return rest.partition("\n")[0].strip() if marker else None


def answer_part(text: str) -> str:
    """The text after the last marker, or the whole text where there is none."""
    marked = after_marker(text)
    return text.strip() if marked is None else marked
