"""`aipo` satisfies what every algorithm must; the other corrections are compared with their formulas."""

from cosmos_core.testing import AlgorithmConformance


class TestAipo(AlgorithmConformance):
    plugin = "aipo"

    def reference(self, decisions):
        weight_N = (decisions.logprobs_N.detach() - decisions.behaviour_logprobs_N).exp().clamp(max=4.0)
        return -weight_N * decisions.advantages_N * decisions.logprobs_N
