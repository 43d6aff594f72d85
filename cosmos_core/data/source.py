"""What gives rows: each with a locator by which it is read again, and its number for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class RawRow:
    """One row as a scan finds it.

    Attributes:
        locator: Where it is, for `RowSource.read`.
        line: Its line (or row) from 1, for people.
        row: What it holds; None if it could not be parsed.
        problem: Why it could not; empty if it could.
    """

    locator: int
    line: int
    row: Any
    problem: str = ""


class RowSource(Protocol):
    """A file, or a table, of rows. Only the locators of its rows are kept in memory."""

    @property
    def name(self) -> str:
        """What it is called in messages, such as its path."""
        ...

    @property
    def folder(self) -> Path:
        """Where relative paths in its rows start."""
        ...

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order.

        Raises:
            DataError: The source cannot be read.
        """
        ...

    def places(self) -> Iterator[int]:
        """The locator of every row, in order, without reading what the rows hold.

        Raises:
            DataError: The source cannot be read.
        """
        ...

    def read(self, locator: int) -> Any:
        """One row again; may be called from several threads at once.

        Raises:
            DataError: The source changed or cannot be read.
        """
        ...
