"""What a file gives: rows, each with a locator by which it is read again, and its line for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class RawRow:
    """One row as a scan finds it.

    Attributes:
        locator: Where it is, for `RowFile.read`.
        line: Its line (or row) from 1, for people.
        row: What it holds; None if it could not be parsed.
        problem: Why it could not; empty if it could.
    """

    locator: int
    line: int
    row: Any
    problem: str = ""


class RowFile(Protocol):
    """A file of rows. Only the locators of its rows are kept in memory."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order.

        Raises:
            DataError: The file cannot be read.
        """
        ...

    def read(self, locator: int) -> Any:
        """One row again.

        Raises:
            DataError: The file changed or cannot be read.
        """
        ...
