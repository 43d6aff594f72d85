"""The objectives over pairs satisfy what every algorithm must."""

import pytest

from cosmos_core.testing import AlgorithmConformance


class TestDpo(AlgorithmConformance):
    plugin = "dpo"


@pytest.mark.nightly
class TestIpo(AlgorithmConformance):
    plugin = "ipo"


@pytest.mark.nightly
class TestBco(AlgorithmConformance):
    plugin = "bco"
