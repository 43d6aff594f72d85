"""Bounds of messages, and texts that fit them (of single fields, see `cosmos_core.types.bounds`).

A peer that was let in may still be broken: what it says ends in logs, terminals, the journal and the page.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, TypeVar

import attrs

from cosmos_core.types.bounds import TEXT

T = TypeVar("T")

DETAIL: Final = 500
"""Characters of why one row or sample came to nothing; the log has the whole."""
REPORT_BYTES: Final = 8 << 20
"""Largest report."""


def sendable(text: str) -> str:
    """A text as messages can hold it: `?` for a lone surrogate, which a decoder or the name of a file may leave."""
    return text.encode(errors="replace").decode()


def fitted(report: T) -> T:
    """A report whose texts are what may be sent: cut, and `sendable`."""
    names = [field.name for field in attrs.fields(type(report))]  # type: ignore[arg-type] # T is attrs
    return attrs.evolve(report, **{name: _fit(getattr(report, name)) for name in names})  # type: ignore[misc]


def _fit(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Enum):
        return sendable(value if len(value) <= TEXT else f"{value[: TEXT - 1]}…")
    if isinstance(value, tuple):
        return tuple(map(_fit, value))
    if isinstance(value, dict):
        return {_fit(key): _fit(each) for key, each in value.items()}
    return fitted(value) if attrs.has(type(value)) else value
