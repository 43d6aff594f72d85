"""Bounds of numbers and texts in messages; what is beyond them is malformed, and the decoder names it.

A peer that was let in may still be broken: what it says ends in logs, terminals, the journal and the page.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias, TypeVar

import attrs
from msgspec import Meta

T = TypeVar("T")

TEXT: Final = 16_384
"""Longest text for people, in characters."""
DETAIL: Final = 500
"""Characters of why one row or sample came to nothing; the log has the whole."""
REPORT_BYTES: Final = 8 << 20
"""Largest report."""

_ONE_LINE: Final = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
_LARGEST: Final = 1.7976931348623157e308

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
"""A number of things, a position, a sequence number."""
Step: TypeAlias = Annotated[int, Meta(ge=-1, le=2**53)]
"""A step or a weight version; -1: none."""
Finite: TypeAlias = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
"""Neither infinite nor NaN."""
Word: TypeAlias = Annotated[str, Meta(max_length=256, pattern=_ONE_LINE)]
"""A name or a mark: one line that can be printed anywhere."""
Address: TypeAlias = Annotated[str, Meta(max_length=1 << 20, pattern=_ONE_LINE)]
"""Endpoints; those of all processes of a replica."""
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT)]
"""For people, of any lines."""


def sendable(text: str) -> str:
    """A text as messages can hold it: `?` for a lone surrogate, which a decoder or the name of a file may leave."""
    return text.encode(errors="replace").decode()


def fitted(report: T) -> T:
    """A report whose texts are what may be sent: cut, and `sendable`."""
    return attrs.evolve(report, **{name: _fit(value) for name, value in _fields(report)})  # type: ignore[misc] # T is attrs


def _fields(record: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(record, field.name)) for field in attrs.fields(type(record))]


def _fit(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(value if len(value) <= TEXT else f"{value[: TEXT - 1]}…")
    if isinstance(value, tuple):
        return tuple(map(_fit, value))
    if isinstance(value, dict):
        return {_fit(key): _fit(each) for key, each in value.items()}
    return fitted(value) if attrs.has(type(value)) else value
