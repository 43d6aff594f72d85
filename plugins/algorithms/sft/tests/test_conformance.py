"""`sft` satisfies what every algorithm must."""

from cosmos_core.testing import AlgorithmConformance


class TestSft(AlgorithmConformance):
    plugin = "sft"

    def reference(self, decisions):
        return -decisions.logprobs_N
