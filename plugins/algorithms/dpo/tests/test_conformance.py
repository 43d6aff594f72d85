"""`dpo` satisfies what every algorithm must; all objectives over pairs are compared with their formulas."""

from cosmos_core.testing import AlgorithmConformance


class TestDpo(AlgorithmConformance):
    plugin = "dpo"
