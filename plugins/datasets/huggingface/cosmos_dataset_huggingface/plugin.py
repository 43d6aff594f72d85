"""The dataset: splits of the `datasets` library, and the mapping of their rows."""

from __future__ import annotations

from cosmos_core.data import FieldMapping, RowsDataset, RowSource
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, hookimpl
from cosmos_dataset_huggingface.loading import load_split, saved_folder
from cosmos_dataset_huggingface.options import HuggingFaceOptions
from cosmos_dataset_huggingface.table import SplitTable


class HuggingFaceDataset(RowsDataset):
    """The dataset.

    Raises:
        DataError: It cannot be loaded, is empty, or has a bad row (dataset, split, row, reason).
    """

    def __init__(self, options: HuggingFaceOptions, context: DatasetContext) -> None:
        mapping = FieldMapping(options)

        def rows(split: str) -> list[RowSource]:
            table = load_split(options, split, context)
            folder = saved_folder(options, context) or context.directory
            return [SplitTable(table, f"{options.path}:{split}", folder, mapping.fields)]

        super().__init__(
            "huggingface",
            options,
            mapping,
            train=rows(options.split),
            heldout=None if options.heldout_split is None else rows(options.heldout_split),
            key_path=context.key_path,
        )


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide datasets of the `datasets` library."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True, preferences=True)
    return Provider(create=HuggingFaceDataset, options=HuggingFaceOptions, capabilities=capabilities)
