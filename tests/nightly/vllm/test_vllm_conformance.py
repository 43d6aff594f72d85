"""The kit for engines, on real vLLM."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.run.planning.checks import supported
from cosmos_core.testing import EngineConformance

# vLLM and what it imports warn about their own future.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]


class TestVllm(EngineConformance):
    plugin = "vllm"
    timeout_s = 60.0
    start_timeout_s = 300.0

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, served):
        """The kit's model with heads of a size that vLLM's attention on a CPU has."""
        return served

    @pytest.fixture
    @classmethod
    def options(cls):
        """On a GPU, too, each request draws by its own seed."""
        return {"seeds": "request"}

    @pytest.fixture
    def capabilities(self, provider, context):
        """The plugin declares no seeds, because of its other draws; it gives up the memory of GPUs alone."""
        able = supported(provider.capabilities, self.tensor_parallel)
        return attrs.evolve(able, seeded=True, sleeps=able.sleeps and context.device.type == "cuda")


class TestVllmThatDrawsForABatch(TestVllm):
    """Its draws are as good, and do not repeat."""

    @pytest.fixture
    @classmethod
    def options(cls):
        return {"seeds": "engine"}

    @pytest.fixture
    def capabilities(self, provider):
        return provider.capabilities


class TestVllmOnTwoRanks(TestVllm):
    """What depends on who holds which slice: each start takes some ten seconds, so that the rest is tested on one."""

    tensor_parallel = 2


OF_SLICES = {
    "test_the_layout_covers_each_tensor_once",
    "test_an_update_is_loaded_and_attested",
    "test_an_incomplete_update_is_refused_and_nothing_changes",
    "test_an_update_in_flight_loses_and_restarts_nothing",
}
OF_DRAWS = {"test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place"}
for kit, wanted in ((TestVllmOnTwoRanks, OF_SLICES), (TestVllmThatDrawsForABatch, OF_DRAWS)):
    for name in dir(TestVllm):
        if name.startswith("test_") and name not in wanted:
            setattr(kit, name, None)
