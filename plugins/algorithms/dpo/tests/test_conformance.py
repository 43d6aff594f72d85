"""The objectives over pairs satisfy what every algorithm must."""

from cosmos_core.testing import AlgorithmConformance


class TestDpo(AlgorithmConformance):
    plugin = "dpo"


class TestIpo(AlgorithmConformance):
    plugin = "ipo"


class TestBco(AlgorithmConformance):
    plugin = "bco"
