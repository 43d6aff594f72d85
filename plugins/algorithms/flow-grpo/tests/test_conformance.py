"""`flow-grpo` satisfies what every algorithm must, and equals the formula of its paper."""

import pytest

from cosmos_core.protocols import AlgorithmContext
from cosmos_core.testing import AlgorithmConformance


def surrogate(decisions, clip):
    """Equation 3 of 2402.03300, without its KL term."""
    ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
    return -(ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(1 - clip, 1 + clip) * decisions.advantages_N)


class TestFlowGrpo(AlgorithmConformance):
    plugin = "flow-grpo"

    def reference(self, decisions):
        return surrogate(decisions, 1e-4)


@pytest.mark.nightly
class TestFlowGrpoOverTheBatch(TestFlowGrpo):
    """One deviation for all groups, and each step alike."""

    @pytest.fixture
    def options(self):
        return {"spread": "batch", "aggregation": "token-mean"}


@pytest.mark.nightly
class TestFlowGrpoNearAReference(AlgorithmConformance):
    plugin = "flow-grpo"
    has_other_terms = True

    @pytest.fixture
    def options(self):
        return {"clip": 0.05, "kl_weight": 0.2}

    def reference(self, decisions):
        return surrogate(decisions, 0.05) + 0.2 * decisions.frozen["reference"].divergence_N


@pytest.mark.nightly
class TestFlowGrpoOnPolicy(TestFlowGrpo):
    """Recomputed log-probs, which the plugin allows without staleness only."""

    @pytest.fixture
    def context(self):
        return AlgorithmContext(group_size=4, temperature=1.0, max_units=16, max_staleness=0)

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute"}
