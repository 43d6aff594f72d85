from __future__ import annotations

import pytest

from cosmos_core.testing import EngineConformance


class TestEmbedded(EngineConformance):
    plugin = "embedded"


class TestEmbeddedInSmallSteps(EngineConformance):
    """Prompts enter in several parts, and the cache grows and shrinks all the time."""

    plugin = "embedded"

    @pytest.fixture
    def options(self):
        return {"prefill_units": 7, "cache_step": 8}
