"""Bounds of numbers and texts in records that go over the wire; a strict decoder refuses what is beyond them."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

TEXT: Final = 16_384
"""Longest text for people, in characters."""

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
