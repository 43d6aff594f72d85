"""The kit for engines."""

from __future__ import annotations

from typing import ClassVar

from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import PluginConformance


class EngineConformance(PluginConformance):
    """What every engine must satisfy."""

    kind: ClassVar[Kind] = "engine"
