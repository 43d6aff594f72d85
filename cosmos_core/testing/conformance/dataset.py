"""The kit for datasets."""

from __future__ import annotations

from typing import ClassVar

from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import PluginConformance


class DatasetConformance(PluginConformance):
    """What every dataset must satisfy."""

    kind: ClassVar[Kind] = "dataset"
