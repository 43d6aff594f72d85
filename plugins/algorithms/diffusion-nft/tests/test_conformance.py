"""`diffusion-nft` satisfies what every algorithm must, and equals the formula of its paper."""

import pytest

from cosmos_core.protocols import AlgorithmContext
from cosmos_core.testing import AlgorithmConformance


class TestDiffusionNft(AlgorithmConformance):
    plugin = "diffusion-nft"
    on_policy_scale = None

    @pytest.fixture
    def context(self):
        return AlgorithmContext(group_size=4, temperature=1.0, max_units=16, max_staleness=2, generates_average=True)

    def reference(self, decisions):
        """Equation 5 of 2509.16117, with the weights of its adaptive form."""
        blended = decisions.frozen["average"].blended
        good_N = (decisions.advantages_N / 10.0 + 0.5).clamp(0.0, 1.0)
        errors_NK = blended.squared_NK / blended.absolute_NK.clamp(min=1e-5)
        return 5.0 * (good_N * errors_NK[:, 0] + (1.0 - good_N) * errors_NK[:, 1])
