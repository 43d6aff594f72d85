"""The kit for engines, on real vLLM."""

from __future__ import annotations

import pytest

from cosmos_core.testing import EngineConformance
from cosmos_core.testing.conformance.engine.updates import UpdateTests

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


class TestVllmOnTwoRanks(UpdateTests):
    plugin = "vllm"
    timeout_s = 60.0
    start_timeout_s = 300.0
    tensor_parallel = 2

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, served):
        """The same."""
        return served

    # Each start takes some ten seconds: what the slices of two ranks change nothing of is tested on one.
    test_an_update_is_loaded_and_attested = None
    test_scores_are_those_of_the_loaded_weights = None
    test_weights_are_loaded_in_the_precision_of_the_recipe = None
    test_the_same_weights_under_a_kept_cache_change_nothing = None
    test_a_sample_that_starts_after_an_update_uses_nothing_older = None
    test_updates_follow_their_order = None
