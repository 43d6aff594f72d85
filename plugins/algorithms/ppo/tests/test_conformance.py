"""`ppo` satisfies what every algorithm must, with a divergence from a reference."""

import pytest

from cosmos_core.testing import AlgorithmConformance


class TestPpo(AlgorithmConformance):
    plugin = "ppo"
    has_other_terms = True

    @pytest.fixture
    def options(self):
        return {"kl_weight": 0.1}

    def reference(self, decisions):
        ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
        gain_N = (ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(0.8, 1.2) * decisions.advantages_N)
        return -gain_N + 0.25 * (decisions.values_N - decisions.targets_N).square()
