"""A text file with one prompt a line as a source of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cosmos_core.data import RawRow, line_at, lines_of
from cosmos_core.errors import DataError


class TextLines:
    """The lines of a file that are not blank, each a row with the field `prompt`, found again by its byte offset.

    Args:
        path: Of the file.
        field: What the one field of a row is called.
    """

    def __init__(self, path: Path, field: str) -> None:
        self._path: Final = path
        self._field: Final = field

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._path)

    @property
    def folder(self) -> Path:
        """The folder that it is in."""
        return self._path.parent

    def scan(self) -> Iterator[RawRow]:
        """Every line once, in order; one that is no UTF-8 has a problem.

        Raises:
            DataError: The file cannot be read.
        """
        for offset, number, line in lines_of(self._path):
            try:
                yield RawRow(locator=offset, line=number, row=self._row(line))
            except UnicodeDecodeError as error:
                yield RawRow(locator=offset, line=number, row=None, problem=f"no UTF-8: byte {error.start} of the line")

    def places(self) -> Iterator[int]:
        """The byte offset of every line, in order.

        Raises:
            DataError: The file cannot be read.
        """
        return (offset for offset, _, _ in lines_of(self._path))

    def read(self, locator: int) -> dict[str, str]:
        """The line that begins at byte `locator`.

        Raises:
            DataError: It is no UTF-8, or the file cannot be read.
        """
        try:
            return self._row(line_at(self._path, locator))
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: byte {locator}: no UTF-8 at byte {error.start} of the line") from error

    def _row(self, line: bytes) -> dict[str, str]:
        return {self._field: line.decode("utf-8-sig").strip()}
