"""The JSON in what a model wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_FENCE: Final = re.compile(r"([ \t]*)(`{3,})([^`]*)")


def json_in(text: str) -> str | None:
    """The last block of JSON, or else the last one of no language; None without any."""
    untagged: str | None = None
    tagged: str | None = None
    for language, source in _blocks(text):
        if language == "json":
            tagged = source
        elif not language:
            untagged = source
    return untagged if tagged is None else tagged


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language in lower case, source) of each closed block, less the indentation of its first line.

    Source: https://spec.commonmark.org/0.31.2/#fenced-code-blocks, with any indentation and backticks alone.
    """
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            opening, lines = fence, []
        elif fence is not None and not fence[3] and len(fence[2]) >= len(opening[2]):
            language, *_ = opening[3].lower().split() or [""]
            yield language, "".join(lines)
            opening = None
        else:
            indent = len(opening[1])
            lines.append(f"{line[:indent].lstrip()}{line[indent:]}\n")
