"""Rows as aligned columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows as aligned columns."""
    listed = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*listed, strict=True)]
    for row in listed:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
