"""`ddrl` satisfies what every algorithm must, and equals the formula of its paper."""

import pytest

from cosmos_core.testing import AlgorithmConformance


def surrogate(decisions, clip):
    """Equation 3 of 2402.03300, without its KL term."""
    ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
    return -(ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(1 - clip, 1 + clip) * decisions.advantages_N)


class TestDdrl(AlgorithmConformance):
    plugin = "ddrl"

    def reference(self, decisions):
        return surrogate(decisions, 1e-4)


@pytest.mark.nightly
class TestDdrlExponential(TestDdrl):
    """All advantages are negative, and rise with the reward all the same."""

    @pytest.fixture
    def options(self):
        return {"exponential": True, "demonstrations": 2}


@pytest.mark.nightly
class TestDdrlNearAReference(AlgorithmConformance):
    plugin = "ddrl"
    has_other_terms = True

    @pytest.fixture
    def options(self):
        return {"clip": 0.05, "kl_weight": 0.2}

    def reference(self, decisions):
        return surrogate(decisions, 0.05) + 0.2 * decisions.frozen["reference"].divergence_N
