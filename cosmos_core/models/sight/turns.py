"""Turns of chats as lists of parts, which the templates of processors take, and others do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from cosmos_core.models.sight.placing import MARK
from cosmos_core.models.weights.loading import TEMPLATE_ERRORS

Turns: TypeAlias = Sequence[Mapping[str, Any]]

_PROBE: Final = "a-turn"
_RAW: Final = "'type'"
"""Of a list that a template has written as it is."""


def takes_parts(render: Callable[[Turns], str]) -> bool:
    """Whether a template wants contents as lists of parts; one that fails on either is taken to.

    Args:
        render: The template.
    """
    return _writes(render, text_parts(_PROBE)) or not _writes(render, _PROBE)


def text_parts(content: str) -> list[dict[str, str]]:
    """A turn without images."""
    return [{"type": "text", "text": content}]


def marked_parts(content: str) -> list[dict[str, str]]:
    """A turn, cut at its marks."""
    texts = [part for text in MARK.split(content) for part in (*text_parts(text), {"type": "image"})][:-1]
    return [part for part in texts if part.get("text", True)]


def _writes(render: Callable[[Turns], str], content: Any) -> bool:
    try:
        written = render([{"role": "user", "content": content}])
    except TEMPLATE_ERRORS:
        return False
    return _PROBE in written and _RAW not in written
