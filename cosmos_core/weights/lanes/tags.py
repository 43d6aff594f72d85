"""Which transfer is which slice of which answer."""

from __future__ import annotations

from typing import Final

from cosmos_core.weights.wire import REQUEST_SLICES

_TAGS: Final = 1 << 31


def tag_of(request: int, index: int) -> int:
    """The tag of slice `index` of an answer; both sides number them alike."""
    return (request * REQUEST_SLICES + index) % _TAGS
