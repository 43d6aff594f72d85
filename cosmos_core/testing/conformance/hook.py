"""The kit for hooks."""

from __future__ import annotations

from typing import ClassVar

from cosmos_core.protocols import Kind
from cosmos_core.testing.conformance.plugin import PluginConformance


class HookConformance(PluginConformance):
    """What every hook must satisfy."""

    kind: ClassVar[Kind] = "hook"
