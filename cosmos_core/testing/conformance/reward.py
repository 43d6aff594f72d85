"""The kit for rewards."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from cosmos_core.protocols import Kind, RewardContext
from cosmos_core.testing.conformance.plugin import PluginConformance


class RewardConformance(PluginConformance):
    """What every reward must satisfy."""

    kind: ClassVar[Kind] = "reward"

    @pytest.fixture
    def context(self, tmp_path: Path) -> RewardContext:  # noqa: ARG002 - a folder is not needed here
        """A reward's context."""
        return RewardContext(name=self.plugin, seed=0)
