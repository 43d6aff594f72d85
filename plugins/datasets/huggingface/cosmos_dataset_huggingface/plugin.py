"""The entry point `huggingface`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_huggingface.dataset import HuggingFaceDataset
from cosmos_dataset_huggingface.options import HuggingFaceOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide datasets of the `datasets` library."""
    return Provider(
        create=HuggingFaceDataset,
        options=HuggingFaceOptions,
        capabilities=DatasetCapabilities(demonstrations=True, references=True, preferences=True),
    )
