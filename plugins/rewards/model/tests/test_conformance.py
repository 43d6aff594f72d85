"""The reward keeps the protocol of rewards, with a tiny random model in the workers."""

import pytest

from cosmos_core.testing import RewardConformance

pytestmark = pytest.mark.nightly


class TestRewardModel(RewardConformance):
    plugin = "reward-model"
    timeout_s = 30.0

    @pytest.fixture
    def options(self, checkpoint):
        return {"path": str(checkpoint)}
