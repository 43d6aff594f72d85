"""The kit for algorithms."""

from __future__ import annotations

from typing import ClassVar

from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import PluginConformance


class AlgorithmConformance(PluginConformance):
    """What every algorithm must satisfy."""

    kind: ClassVar[Kind] = "algorithm"
