"""`distill` satisfies what every algorithm must."""

from cosmos_core.testing import AlgorithmConformance


class TestDistill(AlgorithmConformance):
    plugin = "distill"

    def reference(self, decisions):
        return decisions.frozen["teacher"].divergence_N
