"""The entry point `arithmetic`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_arithmetic.dataset import Arithmetic, ArithmeticOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide the arithmetic word problems."""
    return Provider(
        create=Arithmetic,
        options=ArithmeticOptions,
        capabilities=DatasetCapabilities(demonstrations=True, references=True, preferences=True),
    )
