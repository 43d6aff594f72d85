"""Rows of files as a dataset of two splits."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Final

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext, Split
from cosmos_core.types import Prompt
from cosmos_dataset_jsonl.index import RowIndex
from cosmos_dataset_jsonl.jsonlines import JsonLinesFile
from cosmos_dataset_jsonl.mapping import RowMapping
from cosmos_dataset_jsonl.options import JsonlOptions
from cosmos_dataset_jsonl.parquet import ParquetFile
from cosmos_dataset_jsonl.paths import find_files
from cosmos_dataset_jsonl.raw import RowFile
from cosmos_dataset_jsonl.split import hold_out

PARQUET: Final = frozenset({".parquet", ".pq"})


class FileDataset:
    """The dataset; every row of it is checked when it is made.

    Raises:
        DataError: A file is missing, unreadable, empty or has a bad row (file, line, reason).
    """

    def __init__(self, options: JsonlOptions, context: DatasetContext) -> None:
        mapping = RowMapping(options)

        def index(name: str, value: str) -> RowIndex:
            files = [_open(path, mapping) for path in find_files(name, value, context.directory)]
            return RowIndex(files, mapping, options.on_bad_row)

        train = index("train", options.train)
        heldout = None if options.heldout is None else index("heldout", options.heldout)
        train_rows, heldout_rows = _numbers(options, len(train), 0 if heldout is None else len(heldout))
        self._splits: dict[Split, tuple[RowIndex, range | array[int]]] = {
            "train": (train, train_rows),
            "heldout": (heldout or train, heldout_rows),
        }
        self.num_bad_rows = train.num_bad_rows + (0 if heldout is None else heldout.num_bad_rows)
        """Rows left out because they cannot be used (`on_bad_row = "skip"`)."""

    def size(self, split: Split) -> int:
        """Number of usable rows."""
        return len(self._splits[split][1])

    def row(self, split: Split, index: int) -> Prompt:
        """Read row `index` of the split.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: The file changed since it was checked.
        """
        rows, numbers = self._splits[split]
        if not 0 <= index < len(numbers):
            raise IndexError(f"jsonl: row {index} of split {split!r}, which has {len(numbers)}")
        return rows.prompt(numbers[index])


def _open(path: Path, mapping: RowMapping) -> RowFile:
    return ParquetFile(path, mapping.fields) if path.suffix in PARQUET else JsonLinesFile(path)


def _numbers(options: JsonlOptions, num_train: int, num_heldout: int) -> tuple[range | array[int], range | array[int]]:
    """Row numbers of the train and held-out splits within their files."""
    wanted = options.heldout_rows
    if options.heldout_fraction is not None:
        wanted = max(1, round(options.heldout_fraction * num_train))
    if wanted is None:
        return range(num_train), range(num_heldout)
    if wanted >= num_train:
        raise DataError(
            f"dataset.options: cannot hold {wanted} rows out of {num_train}; none would be left to train on"
        )
    return hold_out(num_train, wanted)
