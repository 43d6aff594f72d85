"""The entry point `curriculum`."""

from __future__ import annotations

from cosmos_core.protocols import Dataset, DatasetCapabilities, Provider, hookimpl
from cosmos_dataset_curriculum.dataset import Curriculum
from cosmos_dataset_curriculum.options import CurriculumOptions


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide curricula, whose rows have what their part's have."""
    return Provider(
        create=Curriculum,
        options=CurriculumOptions,
        capabilities=DatasetCapabilities(demonstrations=True, references=True, preferences=True),
    )
