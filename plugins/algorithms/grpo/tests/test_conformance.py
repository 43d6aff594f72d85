"""`grpo` satisfies what every algorithm must, with each correction; the presets are compared with their formulas."""

import pytest

from cosmos_core.testing import AlgorithmConformance


class TestGrpo(AlgorithmConformance):
    """The ratio against the step's start, the weight against the behaviour policy, every bound, a divergence."""

    plugin = "grpo"
    has_other_terms = True

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute", "importance_cap": 1.0, "dual_clip": 2.0, "kl_weight": 0.2}

    def reference(self, decisions):
        ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
        price_N = -(ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(0.8, 1.2) * decisions.advantages_N)
        bounded_N = price_N.minimum(-2.0 * decisions.advantages_N).where(decisions.advantages_N < 0, price_N)
        weight_N = (decisions.old_logprobs_N - decisions.behaviour_logprobs_N).exp().clamp(max=1.0)
        distance_N = decisions.frozen["reference"].logprobs_N - decisions.logprobs_N
        return weight_N * bounded_N + 0.2 * (distance_N.exp() - distance_N - 1)


class TestGrpoWithCreditOfTurns(AlgorithmConformance):
    """An advantage for each turn, discounted; what is rewarded is not where its sum is."""

    plugin = "grpo"

    @pytest.fixture
    def options(self):
        return {"credit": "turn", "turn_discount": 0.5}
