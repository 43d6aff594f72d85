"""The part of a text that is the answer."""

from __future__ import annotations

from typing import Any

from attrs import validators as check

from cosmos_core.config import option

TAG = check.matches_re(r"[A-Za-z][A-Za-z0-9_-]*")


def tag_option() -> Any:
    """The option of a reward that looks at what is inside a tag."""
    return option(
        None,
        help="Look at what stands in the last `<TAG>…</TAG>` alone; a text without it scores 0. Absent: at all of it.",
        validator=check.optional(TAG),
    )


def inside(text: str, tag: str | None) -> str | None:
    """The text in the last pair of the tag; all of the text without a tag, None where there is no pair."""
    if tag is None:
        return text
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    begin = text.rfind(opening, 0, end) if end >= 0 else -1
    return None if begin < 0 else text[begin + len(opening) : end]
