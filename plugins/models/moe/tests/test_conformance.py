import pytest

from cosmos_core.protocols import ModelContext
from cosmos_core.testing import ModelConformance

pytestmark = pytest.mark.nightly


class Family(ModelConformance):
    """One of the tiny models of this folder, by the plugin's name."""

    @pytest.fixture
    def context(self, configs, tmp_path):
        return ModelContext(path=None, config=configs[self.plugin], assets=tmp_path / "assets")


class TestQwen3Moe(Family):
    plugin = "qwen3-moe"


class TestDeepseek(Family):
    plugin = "deepseek"


class TestMoonlight(Family):
    """With an option for which the model counts."""

    plugin = "moonlight"

    @pytest.fixture
    def options(self):
        return {"bias_rate": 0.001}


class TestQwen3MoeThatReplays(Family):
    """With the option for which the model records."""

    plugin = "qwen3-moe"

    @pytest.fixture
    def options(self):
        return {"router_replay": True}
