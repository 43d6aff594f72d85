"""How a run's processes are started and stopped: one `Launcher` per kind of place."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.config.schema import LaunchConfig
from cosmos_core.run.launch.launcher import Exit, Launcher, ProcessSpec
from cosmos_core.run.launch.local import LocalLauncher

__all__ = ["Exit", "Launcher", "ProcessSpec", "make_launcher"]


def make_launcher(config: LaunchConfig, logs: Path) -> Launcher:
    """The launcher that a recipe asks for; output goes to `logs`."""
    assert config.launcher == "local", "the schema allows no other"
    return LocalLauncher(logs)
