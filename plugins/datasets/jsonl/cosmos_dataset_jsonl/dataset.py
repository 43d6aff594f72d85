"""Rows of files as a dataset of two splits."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cosmos_core.data import FieldMapping, JsonLinesFile, RowsDataset, RowSource, find_files
from cosmos_core.protocols import DatasetContext
from cosmos_dataset_jsonl.options import JsonlOptions
from cosmos_dataset_jsonl.parquet import ParquetFile

PARQUET: Final = frozenset({".parquet", ".pq"})


class FileDataset(RowsDataset):
    """The dataset.

    Raises:
        DataError: A file is missing, unreadable, empty or has a bad row (file, line, reason).
    """

    def __init__(self, options: JsonlOptions, context: DatasetContext) -> None:
        mapping = FieldMapping(options)

        def files(name: str, value: str) -> list[RowSource]:
            return [
                _open(path, mapping.fields)
                for path in find_files(f"{context.key_path}.{name}", value, context.directory)
            ]

        super().__init__(
            "jsonl",
            options,
            mapping,
            train=files("train", options.train),
            heldout=None if options.heldout is None else files("heldout", options.heldout),
            key_path=context.key_path,
        )


def _open(path: Path, fields: frozenset[str]) -> RowSource:
    return ParquetFile(path, fields) if path.suffix in PARQUET else JsonLinesFile(path)
