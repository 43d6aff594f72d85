"""The entry point `jsonl`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_jsonl.dataset import FileDataset
from cosmos_dataset_jsonl.options import JsonlOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide datasets from files."""
    return Provider(
        create=FileDataset,
        options=JsonlOptions,
        capabilities=DatasetCapabilities(demonstrations=True, references=True, preferences=True),
    )
