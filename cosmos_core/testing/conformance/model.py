"""The kit for models."""

from __future__ import annotations

from typing import ClassVar

from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import PluginConformance


class ModelConformance(PluginConformance):
    """What every model must satisfy."""

    kind: ClassVar[Kind] = "model"
