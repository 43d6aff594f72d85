"""Parquet: rows found again by their number. The columns that the mapping needs are held in Arrow's compact form."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cosmos_core.errors import DataError
from cosmos_dataset_jsonl.raw import RawRow

BATCH_ROWS: Final = 4096


class ParquetFile:
    """A `.parquet` file.

    Raises:
        DataError: pyarrow is not installed.
    """

    def __init__(self, path: Path, fields: frozenset[str]) -> None:
        self._path = path
        self._fields = fields
        self._arrow = _pyarrow(path)
        self._batches: list[Any] = []
        self._starts: list[int] = []

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order; a column that does not exist is missing from each of them.

        Raises:
            DataError: The file cannot be read.
        """
        self._load()
        for start, batch in zip(self._starts, self._batches, strict=True):
            for number, row in enumerate(batch.to_pylist(), start):
                yield RawRow(locator=number, line=number + 1, row=row)

    def read(self, locator: int) -> Any:
        """Row number `locator`, from 0."""
        index = bisect.bisect_right(self._starts, locator) - 1
        return self._batches[index].slice(locator - self._starts[index], 1).to_pylist()[0]

    def _load(self) -> None:
        self._batches, self._starts, total = [], [], 0
        try:
            with self._arrow.ParquetFile(self._path) as file:
                names = file.schema_arrow.names
                # Without any column a batch would not know its number of rows.
                columns = [name for name in names if name in self._fields] or names
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                    self._batches.append(batch)
                    self._starts.append(total)
                    total += batch.num_rows
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}: no readable Parquet file: {error}") from error


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra of this distribution
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet files need pyarrow; run: pip install 'cosmos-dataset-jsonl[parquet]'"
        ) from error
    module: ModuleType = pyarrow.parquet
    return module
