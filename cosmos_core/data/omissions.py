"""Counting rows that are left out, by reason."""

from __future__ import annotations

from typing import Final

from cosmos_core.protocols import Omission

_MANY: Final = "other reasons"
_MOST_REASONS: Final = 50


class Omissions:
    """Rows that were left out so far; the first of each reason is remembered."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str, place: str) -> None:
        """Count one row.

        Args:
            reason: What it has in common with others; beyond 50 reasons the rest are counted together.
            place: Where it is, and what it is like.
        """
        if reason not in self._counts and len(self._counts) >= _MOST_REASONS:
            reason = _MANY
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._first.setdefault(reason, place)

    @property
    def total(self) -> int:
        """How many rows there are of all reasons."""
        return sum(self._counts.values())

    def told(self) -> tuple[Omission, ...]:
        """The reasons, the most frequent first."""
        ordered = sorted(self._counts, key=lambda reason: (-self._counts[reason], reason))
        return tuple(
            Omission(reason=reason, num_rows=self._counts[reason], first=self._first[reason]) for reason in ordered
        )
