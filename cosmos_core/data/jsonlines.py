"""JSONL: one JSON object a line, found again by its byte offset. Blank lines are no rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cosmos_core.data.rows import RawRow
from cosmos_core.errors import DataError

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def lines_of(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(byte offset, number from 1, line) of every line that is not blank, in order.

    Raises:
        DataError: The file cannot be read.
    """
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.removeprefix(BYTE_ORDER_MARK).strip():
                    yield offset, number, line
                offset += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def line_at(path: Path, offset: int) -> bytes:
    """The line that begins at a byte; raises DataError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.readline()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


class JsonLinesFile:
    """A `.jsonl` file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._path)

    @property
    def folder(self) -> Path:
        """The folder that it is in."""
        return self._path.parent

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order; a line that is no JSON has a problem.

        Raises:
            DataError: The file cannot be read.
        """
        for offset, number, line in lines_of(self._path):
            row, problem = _parse(line)
            yield RawRow(locator=offset, line=number, row=row, problem=problem)

    def places(self) -> Iterator[int]:
        """The byte offset of every row, in order; no line is parsed; raises DataError if the file cannot be read."""
        return (offset for offset, _, _ in lines_of(self._path))

    def read(self, locator: int) -> Any:
        """The row whose line begins at byte `locator`.

        Raises:
            DataError: The line is no JSON, so bad or changed since it was scanned; or the file cannot be read.
        """
        row, problem = _parse(line_at(self._path, locator))
        if problem:
            raise DataError(f"{self._path}: byte {locator}: {problem}")
        return row


def _parse(line: bytes) -> tuple[Any, str]:
    """The row of a line, or why there is none."""
    try:
        return json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8").rstrip()), ""
    except UnicodeDecodeError as error:
        return None, f"no UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return None, f"no JSON: {error.msg} at column {error.colno}"
    except (RecursionError, ValueError) as error:
        return None, f"JSON that cannot be read: {error}"
