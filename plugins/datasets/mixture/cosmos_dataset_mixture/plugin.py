"""The entry point `mixture`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_mixture.dataset import Mixture
from cosmos_dataset_mixture.options import MixtureOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide mixtures, whose rows have what their parts' have."""
    return Provider(
        create=Mixture,
        options=MixtureOptions,
        capabilities=DatasetCapabilities(demonstrations=True, references=True, preferences=True),
    )
