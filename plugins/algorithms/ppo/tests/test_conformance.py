"""`ppo` satisfies what every algorithm must."""

import pytest

from cosmos_core.protocols import AlgorithmContext
from cosmos_core.testing import AlgorithmConformance


class TestPpo(AlgorithmConformance):
    plugin = "ppo"
    has_other_terms = True

    def reference(self, decisions):
        ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
        gain_N = (ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(0.8, 1.2) * decisions.advantages_N)
        return -gain_N + 0.25 * (decisions.values_N - decisions.targets_N).square()


@pytest.mark.nightly
class TestPpoWithDivergence(TestPpo):
    @pytest.fixture
    def options(self):
        return {"kl_weight": 0.1, "old_logprobs": "recompute", "whiten": False}

    @pytest.fixture
    def context(self):
        return AlgorithmContext(group_size=4, temperature=1.0, max_units=16, max_staleness=0)
