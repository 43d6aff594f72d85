"""The kit for engines, on real vLLM."""

from __future__ import annotations

import pytest

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
