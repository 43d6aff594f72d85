"""The dataset: files of questions."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.data import JsonLinesFile, RowsDataset, RowSource, expand, find_files
from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_dataset_reason.mapping import QuestionMapping
from cosmos_dataset_reason.options import ReasonOptions


class ReasonDataset(RowsDataset):
    """The dataset.

    Raises:
        DataError: A file or the folder of media is missing, or a question is bad (file, line, reason).
    """

    def __init__(self, options: ReasonOptions, context: DatasetContext) -> None:
        def files(name: str, value: str) -> list[RowSource]:
            return [JsonLinesFile(path) for path in find_files(name, value, context.directory)]

        super().__init__(
            "reason",
            options,
            QuestionMapping(options, _media_folder(options, context.directory)),
            train=files("train", options.train),
            heldout=None if options.heldout is None else files("heldout", options.heldout),
        )


def _media_folder(options: ReasonOptions, directory: Path) -> Path | None:
    if options.media_folder is None:
        return None
    folder = (directory / Path(expand("media_folder", options.media_folder)).expanduser()).resolve()
    if not folder.is_dir():
        raise DataError(f"dataset.options.media_folder: no folder at {folder}")
    return folder
