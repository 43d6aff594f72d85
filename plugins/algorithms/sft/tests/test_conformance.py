"""`sft` satisfies what every algorithm must."""

import pytest

from cosmos_core.testing import AlgorithmConformance


class TestSft(AlgorithmConformance):
    plugin = "sft"

    def reference(self, decisions):
        return -decisions.logprobs_N


@pytest.mark.nightly
class TestSftOnRows(TestSft):
    """Each demonstration alike."""

    @pytest.fixture
    def options(self):
        return {"aggregation": "sequence-mean-token-mean"}
