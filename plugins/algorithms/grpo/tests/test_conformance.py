"""GRPO, Dr. GRPO and DAPO satisfy what every algorithm must, and equal the formulae of their papers."""

import pytest
import torch

from cosmos_core.protocols import AlgorithmContext
from cosmos_core.testing import AlgorithmConformance


def surrogate(decisions, *, low, high):
    """Equation 3 of 2402.03300, without its KL term."""
    ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
    gain_N = (ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(1 - low, 1 + high) * decisions.advantages_N)
    return -gain_N


class TestGrpo(AlgorithmConformance):
    plugin = "grpo"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.2)


class TestGrpoOnTokens(TestGrpo):
    @pytest.fixture
    def options(self):
        return {"aggregation": "token-mean"}


class TestDrGrpo(AlgorithmConformance):
    plugin = "dr-grpo"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.2)


class TestDapo(AlgorithmConformance):
    plugin = "dapo"

    def reference(self, decisions):
        return surrogate(decisions, low=0.2, high=0.28)


class Corrected(AlgorithmConformance):
    """With every correction on: the ratio against the step's start, the weight against the behaviour policy."""

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute", "importance_cap": 1.0, "dual_clip": 2.0}

    def reference(self, decisions):
        weight_N = (decisions.old_logprobs_N - decisions.behaviour_logprobs_N).exp().clamp(max=1.0)
        clipped_N = surrogate(decisions, low=0.2, high=0.28 if self.plugin == "dapo" else 0.2)
        is_bad_N = decisions.advantages_N < 0
        return weight_N * clipped_N.minimum(-2.0 * decisions.advantages_N).where(is_bad_N, clipped_N)


class TestGrpoCorrected(Corrected):
    plugin = "grpo"


class TestDrGrpoCorrected(Corrected):
    plugin = "dr-grpo"


class TestDapoCorrected(Corrected):
    plugin = "dapo"


class TestGrpoOnPolicy(TestGrpo):
    """Recomputed log-probs alone, which the plugin allows without staleness only."""

    @pytest.fixture
    def context(self):
        return AlgorithmContext(group_size=4, temperature=1.0, max_units=16, max_staleness=0)

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute"}


class TestGrpoMasked(TestGrpo):
    """Tokens, and sequences of negative advantage, that trainer and engine see too differently do not count."""

    @pytest.fixture
    def options(self):
        return {"old_logprobs": "recompute", "importance_cap": 1.2, "importance_floor": 0.8, "sequence_limit": 0.05}

    def reference(self, decisions):
        ratio_N = (decisions.old_logprobs_N - decisions.behaviour_logprobs_N).exp()
        weight_N = torch.where((ratio_N < 0.8) | (ratio_N > 1.2), 0.0, ratio_N)
        for sequence in range(decisions.num_sequences):
            mine_N = decisions.sequence_N == sequence
            distance_N = (decisions.behaviour_logprobs_N - decisions.logprobs_N.detach())[mine_N]
            if len(distance_N) and distance_N.mean() > 0.05:
                weight_N = torch.where(mine_N & (decisions.advantages_N < 0), 0.0, weight_N)
        return weight_N * surrogate(decisions, low=0.2, high=0.2)
