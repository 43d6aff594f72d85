"""Files of one row a line, found again by its byte offset, such as JSONL. Blank lines are no rows."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cosmos_core.data.rows import RawRow
from cosmos_core.errors import DataError

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class LinesFile(ABC):
    """A file in UTF-8 with a row on each line that is not blank (see `RowSource`)."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path

    @abstractmethod
    def parse(self, line: str) -> tuple[Any, str]:
        """The row of a line, or why there is none."""

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._path)

    @property
    def folder(self) -> Path:
        """The folder that it is in."""
        return self._path.parent

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order; a line that cannot be parsed has a problem.

        Raises:
            DataError: The file cannot be read.
        """
        for offset, number, line in self._lines():
            row, problem = self._row(line)
            yield RawRow(locator=offset, line=number, row=row, problem=problem)

    def places(self) -> Iterator[int]:
        """The byte offset of every row, in order; no line is parsed; raises DataError if the file cannot be read."""
        return (offset for offset, _, _ in self._lines())

    def read(self, locator: int) -> Any:
        """The row whose line begins at byte `locator`.

        Raises:
            DataError: The line cannot be parsed, so is bad or changed since it was scanned; or the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(locator)
                row, problem = self._row(file.readline())
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        if problem:
            raise DataError(f"{self._path}: byte {locator}: {problem}")
        return row

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(byte offset, number from 1, line) of every line that is not blank, in order."""
        offset = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.removeprefix(BYTE_ORDER_MARK).strip():
                        yield offset, number, line
                    offset += len(line)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error

    def _row(self, line: bytes) -> tuple[Any, str]:
        try:
            return self.parse(line.removeprefix(BYTE_ORDER_MARK).decode())
        except UnicodeDecodeError as error:
            return None, f"no UTF-8: byte {error.start} of the line"


class JsonLinesFile(LinesFile):
    """A `.jsonl` file: one JSON object a line."""

    def parse(self, line: str) -> tuple[Any, str]:
        """The object of a line, or why there is none."""
        try:
            return json.loads(line.rstrip()), ""
        except json.JSONDecodeError as error:
            return None, f"no JSON: {error.msg} at column {error.colno}"
        except (RecursionError, ValueError) as error:
            return None, f"JSON that cannot be read: {error}"
