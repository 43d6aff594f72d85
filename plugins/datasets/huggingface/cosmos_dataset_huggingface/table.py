"""A split as a source of rows: mapped from Arrow files, read by number, images left as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cosmos_core.data import RawRow
from cosmos_core.errors import DataError

BATCH_ROWS: Final = 1024


class SplitTable:
    """Rows of one split.

    Args:
        split: A `datasets.Dataset`.
        name: For messages.
        folder: Where relative paths in its rows start.
        fields: Columns that are needed; others are never read.
    """

    def __init__(self, split: Any, name: str, folder: Path, fields: frozenset[str]) -> None:
        self._name: Final = name
        self._folder: Final = folder
        # Without any column a row would not know that it exists.
        columns = [column for column in split.column_names if column in fields] or split.column_names
        # As Arrow's own values: nothing is decoded, so an image is the bytes or the path that is stored.
        self._table: Final = split.select_columns(columns).with_format("arrow")

    @property
    def name(self) -> str:
        """The names of its dataset and split."""
        return self._name

    @property
    def folder(self) -> Path:
        """The folder in which relative paths of its rows start."""
        return self._folder

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order.

        Raises:
            DataError: A file cannot be read.
        """
        for first in range(0, len(self._table), BATCH_ROWS):
            for number, row in enumerate(self._rows(first, min(first + BATCH_ROWS, len(self._table))), first):
                yield RawRow(locator=number, line=number + 1, row=row)

    def places(self) -> Iterator[int]:
        """The number of every row."""
        return iter(range(len(self._table)))

    def read(self, locator: int) -> Any:
        """Row number `locator`, from 0.

        Raises:
            DataError: Its file cannot be read.
        """
        return self._rows(locator, locator + 1)[0]

    def _rows(self, first: int, end: int) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = self._table[first:end].to_pylist()
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{self._name}: rows {first} to {end - 1} cannot be read: {error}") from error
        return rows
