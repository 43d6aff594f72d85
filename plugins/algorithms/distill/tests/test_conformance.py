"""`distill` satisfies what every algorithm must."""

import pytest

from cosmos_core.testing import AlgorithmConformance


class TestExact(AlgorithmConformance):
    plugin = "distill"

    def reference(self, decisions):
        return decisions.frozen["teacher"].divergence_N


@pytest.mark.nightly
class TestJsd(TestExact):
    @pytest.fixture
    def options(self):
        return {"divergence": "jsd", "beta": 0.1, "top": None}


@pytest.mark.nightly
class TestSampled(AlgorithmConformance):
    plugin = "distill"
    rewards_order_advantages = False

    @pytest.fixture
    def options(self):
        return {"estimate": "sampled"}

    def reference(self, decisions):
        now_N = decisions.logprobs_N.detach()
        weight_N = (now_N - decisions.behaviour_logprobs_N).exp().minimum(now_N.new_tensor(2.0))
        return (now_N - decisions.frozen["teacher"].logprobs_N) * weight_N * decisions.logprobs_N
