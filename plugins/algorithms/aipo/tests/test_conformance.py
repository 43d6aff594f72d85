"""Each correction satisfies what every algorithm must, and equals the formula of its paper."""

import pytest
import torch

from cosmos_core.testing import AlgorithmConformance


def surrogate(decisions):
    """Equation 3 of 2402.03300, without its KL term."""
    ratio_N = (decisions.logprobs_N - decisions.old_logprobs_N).exp()
    return -(ratio_N * decisions.advantages_N).minimum(ratio_N.clamp(0.8, 1.2) * decisions.advantages_N)


def start_over_behaviour(decisions):
    return (decisions.old_logprobs_N - decisions.behaviour_logprobs_N).exp()


class TestAipo(AlgorithmConformance):
    plugin = "aipo"

    def reference(self, decisions):
        weight_N = (decisions.logprobs_N.detach() - decisions.behaviour_logprobs_N).exp().clamp(max=4.0)
        return -weight_N * decisions.advantages_N * decisions.logprobs_N


@pytest.mark.nightly
class TestDecoupledPpo(AlgorithmConformance):
    plugin = "decoupled-ppo"

    def reference(self, decisions):
        return start_over_behaviour(decisions).clamp(max=5.0) * surrogate(decisions)


@pytest.mark.nightly
class TestTis(AlgorithmConformance):
    plugin = "tis"

    def reference(self, decisions):
        return start_over_behaviour(decisions).clamp(max=2.0) * surrogate(decisions)


@pytest.mark.nightly
class TestIcepop(AlgorithmConformance):
    plugin = "icepop"

    def reference(self, decisions):
        ratio_N = start_over_behaviour(decisions)
        return torch.where((ratio_N < 0.5) | (ratio_N > 5.0), 0.0, ratio_N) * surrogate(decisions)


@pytest.mark.nightly
class TestSequenceMasking(AlgorithmConformance):
    plugin = "sequence-masking"

    def reference(self, decisions):
        prices_N = surrogate(decisions)
        for sequence in range(decisions.num_sequences):
            mine_N = decisions.sequence_N == sequence
            distance_N = (decisions.behaviour_logprobs_N - decisions.logprobs_N.detach())[mine_N]
            if len(distance_N) and distance_N.mean() > 0.1:
                prices_N = torch.where(mine_N & (decisions.advantages_N < 0), 0.0, prices_N)
        return prices_N
