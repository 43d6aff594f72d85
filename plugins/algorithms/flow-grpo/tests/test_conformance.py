"""`flow-grpo` satisfies what every algorithm must, with every term that it has."""

import pytest

from cosmos_core.testing import AlgorithmConformance


class TestFlowGrpo(AlgorithmConformance):
    plugin = "flow-grpo"
    has_other_terms = True

    @pytest.fixture
    def options(self):
        return {"clip": 0.05, "kl_weight": 0.2, "spread": "batch", "aggregation": "token-mean"}

    def reference(self, decisions):
        """Equation 3 of 2402.03300, with the divergence of each step."""
        ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
        gain_N = (ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(0.95, 1.05) * decisions.advantages_N)
        return -gain_N + 0.2 * decisions.frozen["reference"].divergence_N
