"""Each preset satisfies what every algorithm must, and equals the formula of its paper."""

import pytest
import torch

from cosmos_core.protocols import AlgorithmContext
from cosmos_core.testing import AlgorithmConformance


def surrogate(decisions, *, low, high):
    """Equation 3 of 2402.03300, without its KL term."""
    ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
    gain_N = (ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(1 - low, 1 + high) * decisions.advantages_N)
    return -gain_N


def weighted(decisions, *, cap):
    """Equation 4 of 2506.13585."""
    weight_N = (decisions.logprobs_N - decisions.old_logprobs_N).detach().exp().clamp(max=cap)
    return -weight_N * decisions.advantages_N * decisions.logprobs_N


class TestGrpo(AlgorithmConformance):
    plugin = "grpo"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.2)


@pytest.mark.nightly
class TestDrGrpo(AlgorithmConformance):
    plugin = "dr-grpo"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.2)


@pytest.mark.nightly
class TestDapo(AlgorithmConformance):
    plugin = "dapo"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.28)


@pytest.mark.nightly
class TestGspo(AlgorithmConformance):
    plugin = "gspo"

    def reference(self, decisions):
        """Equation 13 of 2507.18071."""
        log_ratio_N = decisions.logprobs_N - decisions.old_logprobs_N
        prices_N = torch.empty_like(log_ratio_N)
        for sequence in range(decisions.num_sequences):
            mine_N = decisions.sequence_N == sequence
            own_n, advantages_n = decisions.logprobs_N[mine_N], decisions.advantages_N[mine_N]
            ratio_n = log_ratio_N[mine_N].mean().exp().detach() * (own_n - own_n.detach()).exp()
            clipped_n = ratio_n.clamp(1 - 3e-4, 1 + 4e-4)
            prices_N[mine_N] = -(ratio_n * advantages_n).minimum(clipped_n * advantages_n)
        return prices_N


@pytest.mark.nightly
class TestCispo(AlgorithmConformance):
    plugin = "cispo"

    def reference(self, decisions):
        return weighted(decisions, cap=5.0)


@pytest.mark.nightly
class TestRloo(AlgorithmConformance):
    plugin = "rloo"

    def reference(self, decisions):
        return weighted(decisions, cap=2.0)


@pytest.mark.nightly
class TestReinforcePlusPlus(AlgorithmConformance):
    plugin = "reinforce-plus-plus"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.2)


@pytest.mark.nightly
class TestReinforcePlusPlusNearAReference(TestReinforcePlusPlus):
    """The divergence is in the advantages, which are whitened over the batch."""

    @pytest.fixture
    def options(self):
        return {"kl_weight": 0.2}


@pytest.mark.nightly
class TestGrpoNearAReference(AlgorithmConformance):
    plugin = "grpo"
    has_other_terms = True

    @pytest.fixture
    def options(self):
        return {"kl_weight": 0.2}

    def reference(self, decisions):
        distance_N = decisions.frozen["reference"].logprobs_N - decisions.logprobs_N
        return surrogate(decisions, low=0.2, high=0.2) + 0.2 * (distance_N.exp() - distance_N - 1)


@pytest.mark.nightly
class TestDapoCorrected(AlgorithmConformance):
    """With every bound: the ratio against the step's start, the weight against the behaviour policy."""

    plugin = "dapo"

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute", "importance_cap": 1.0, "dual_clip": 2.0}

    def reference(self, decisions):
        weight_N = (decisions.old_logprobs_N - decisions.behaviour_logprobs_N).exp().clamp(max=1.0)
        clipped_N = surrogate(decisions, low=0.2, high=0.28)
        is_bad_N = decisions.advantages_N < 0
        return weight_N * clipped_N.minimum(-2.0 * decisions.advantages_N).where(is_bad_N, clipped_N)


@pytest.mark.nightly
class TestGrpoOnPolicy(TestGrpo):
    """Recomputed log-probs alone, which the plugin allows without staleness only."""

    @pytest.fixture
    def context(self):
        return AlgorithmContext(group_size=4, temperature=1.0, max_units=16, max_staleness=0)

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute"}
