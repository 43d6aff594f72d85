"""The entry point `shapes`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_shapes.dataset import Shapes, ShapesOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide pictures of shapes."""
    return Provider(
        create=Shapes,
        options=ShapesOptions,
        capabilities=DatasetCapabilities(demonstrations=True, references=True),
    )
