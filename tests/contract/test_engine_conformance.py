from __future__ import annotations

import pytest

from cosmos_core.testing import EngineConformance
from cosmos_core.testing.ranks import forked_ranks


class TestEmbedded(EngineConformance):
    plugin = "embedded"


class TestEmbeddedInSmallSteps(EngineConformance):
    """Prompts enter in several parts, and the cache grows and shrinks all the time."""

    plugin = "embedded"

    @pytest.fixture
    def options(self):
        return {"prefill_units": 7, "cache_step": 8}


@pytest.mark.slow
class TestEmbeddedOnTwoRanks(EngineConformance):
    """The model is split over two processes."""

    plugin = "embedded"
    tensor_parallel = 2

    @pytest.fixture
    def options(self):
        return {"prefill_units": 40, "cache_step": 8}

    @pytest.fixture(autouse=True)
    def ranks(self):
        with forked_ranks():
            yield
