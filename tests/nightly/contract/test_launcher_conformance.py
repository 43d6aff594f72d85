from __future__ import annotations

from cosmos_core.testing import LauncherConformance


class TestLocal(LauncherConformance):
    plugin = "local"
