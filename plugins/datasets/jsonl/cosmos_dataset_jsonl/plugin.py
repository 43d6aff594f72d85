"""Rows of files as a dataset of two splits."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config import option
from cosmos_core.data import FieldMapping, FieldOptions, JsonLinesFile, RowsDataset, RowSource, find_files
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, hookimpl
from cosmos_dataset_jsonl.parquet import ParquetFile

PARQUET: Final = frozenset({".parquet", ".pq"})


@attrs.frozen(kw_only=True)
class JsonlOptions(FieldOptions):
    """The files, the making of prompts from their rows, and the rows held out."""

    train: str = option(
        help="File of the train split, `.jsonl` or `.parquet`; a glob takes several, in order of their names. "
        "`${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the recipe."
    )
    heldout: str | None = option(None, help="File or glob of the held-out split.")

    def __attrs_post_init__(self) -> None:
        FieldOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")


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


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide datasets from files."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True, preferences=True)
    return Provider(create=FileDataset, options=JsonlOptions, capabilities=capabilities)
