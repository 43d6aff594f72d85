"""The nearest known names to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, limit: int = 1) -> list[str]:
    """Known names that look like `name`, best first; case, `-` and `_` do not count."""
    by_plain: dict[str, list[str]] = {}
    for candidate in known:
        by_plain.setdefault(_plain(candidate), []).append(candidate)
    close = difflib.get_close_matches(_plain(name), by_plain, n=limit, cutoff=0.6)
    return [candidate for plain in close for candidate in by_plain[plain]][:limit]


def suggestion(name: str, known: Iterable[str], *, limit: int = 1) -> str:
    """`did you mean …?`, or what is allowed if nothing looks alike."""
    candidates = sorted(known)
    close = nearest(name, candidates, limit=limit)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"allowed: {', '.join(candidates)}" if candidates else "nothing is allowed here"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
