"""Parquet: rows found again by their number. What was read last of the columns that are needed stays in memory."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cosmos_core.data import RawRow
from cosmos_core.errors import DataError

BATCH_ROWS: Final = 4096
CACHE_BYTES: Final = 256 << 20
"""Row groups of one file that stay in memory, in Arrow's form; always the last one."""


class ParquetFile:
    """A `.parquet` file, read by row groups.

    Raises:
        DataError: pyarrow is not installed, or the file is no readable Parquet.
    """

    def __init__(self, path: Path, fields: frozenset[str]) -> None:
        self._path: Final = path
        self._lock: Final = threading.Lock()
        self._groups: Final[OrderedDict[int, Any]] = OrderedDict()
        self._held_bytes = 0
        try:
            # Open as long as the dataset is: to open a file reads the metadata of all its row groups.
            self._file: Final = _pyarrow(path).ParquetFile(path)
            names = self._file.schema_arrow.names
            metadata = self._file.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        # Without any column a row group would not know its number of rows.
        self._columns: Final = [name for name in names if name in fields] or names
        self._starts: Final = [0, *itertools.accumulate(sizes)]

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._path)

    @property
    def folder(self) -> Path:
        """The folder that it is in."""
        return self._path.parent

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order; a column that does not exist is missing from each of them.

        Raises:
            DataError: The file cannot be read.
        """
        for group, start in enumerate(self._starts[:-1]):
            numbers = itertools.count(start)
            for batch in self._group(group).to_batches(max_chunksize=BATCH_ROWS):
                for row in batch.to_pylist():
                    number = next(numbers)
                    yield RawRow(locator=number, line=number + 1, row=row)

    def places(self) -> Iterator[int]:
        """The number of every row, from the file's own metadata."""
        return iter(range(self._starts[-1]))

    def read(self, locator: int) -> Any:
        """Row number `locator`, from 0.

        Raises:
            DataError: The file cannot be read.
        """
        group = bisect.bisect_right(self._starts, locator) - 1
        return self._group(group).slice(locator - self._starts[group], 1).to_pylist()[0]

    def _group(self, group: int) -> Any:
        """A row group as a table. One thread reads at a time: a reader of pyarrow is not to be shared."""
        with self._lock:
            if group not in self._groups:
                self._groups[group] = self._load(group)
                self._held_bytes += self._groups[group].nbytes
            self._groups.move_to_end(group)
            while len(self._groups) > 1 and self._held_bytes > CACHE_BYTES:
                _, table = self._groups.popitem(last=False)
                self._held_bytes -= table.nbytes
            return self._groups[group]

    def _load(self, group: int) -> Any:
        try:
            return self._file.read_row_group(group, columns=self._columns)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self._path}: no readable Parquet file: {error}")


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra of this distribution
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet files need pyarrow; run: pip install 'cosmos-dataset-jsonl[parquet]'"
        ) from error
    module: ModuleType = pyarrow.parquet
    return module
