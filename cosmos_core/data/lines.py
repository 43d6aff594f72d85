"""Lines of a text file, found again by their byte offsets; blank ones do not count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
    """The line that begins at a byte.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.readline()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
