"""The dataset: files of questions."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.data import JsonLinesFile, RowsDataset, RowSource, expand, find_files
from cosmos_core.errors import DataError
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, hookimpl
from cosmos_dataset_reason.mapping import QuestionMapping
from cosmos_dataset_reason.options import ReasonOptions


class ReasonDataset(RowsDataset):
    """The dataset.

    Raises:
        DataError: A file or the folder of media is missing, or a question is bad (file, line, reason).
    """

    def __init__(self, options: ReasonOptions, context: DatasetContext) -> None:
        def files(name: str, value: str) -> list[RowSource]:
            found = find_files(f"{context.key_path}.{name}", value, context.directory)
            return [JsonLinesFile(path) for path in found]

        media_folder = _media_folder(options, context)
        super().__init__(
            "reason",
            options,
            QuestionMapping(options, media_folder, is_imitated=options.demonstrations == "required"),
            train=files("train", options.train),
            heldout=None if options.heldout is None else files("heldout", options.heldout),
            key_path=context.key_path,
            # Nobody imitates a benchmark.
            heldout_mapping=QuestionMapping(options, media_folder),
        )


def _media_folder(options: ReasonOptions, context: DatasetContext) -> Path | None:
    if options.media_folder is None:
        return None
    key = f"{context.key_path}.media_folder"
    folder = (context.directory / Path(expand(key, options.media_folder)).expanduser()).resolve()
    if not folder.is_dir():
        raise DataError(f"{key}: no folder at {folder}")
    return folder


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide questions about videos and images."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True)
    return Provider(create=ReasonDataset, options=ReasonOptions, capabilities=capabilities)
