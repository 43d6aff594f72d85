"""The entry point `reason`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_reason.dataset import ReasonDataset
from cosmos_dataset_reason.options import ReasonOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide questions about videos and images."""
    return Provider(
        create=ReasonDataset,
        options=ReasonOptions,
        capabilities=DatasetCapabilities(demonstrations=False, references=True),
    )
