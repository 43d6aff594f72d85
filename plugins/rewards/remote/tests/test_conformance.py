"""Every reward of the package keeps the protocol of rewards, against a server that answers."""

import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import RewardConformance
from cosmos_core.types import Prompt

pytestmark = pytest.mark.nightly


def completion(text, reference="8"):
    return Completion(prompt=Prompt(text="?", reference=reference), text=text)


class TestJudge(RewardConformance):
    plugin = "judge"
    variables = ("JUDGE_KEY",)
    reference_is_optional = True
    examples = ((completion("xx"), 0.4), (completion("x" * 99), 1.0))

    @pytest.fixture
    def options(self, standin, secret):
        return {"url": f"{standin.url}/v1", "model": "any", "key_variable": "JUDGE_KEY", "backoff_s": 0.01}


class TestService(RewardConformance):
    plugin = "service"
    reference_is_optional = True
    examples = ((completion("xx"), 2.0), (completion(""), 0.0))

    @pytest.fixture
    def options(self, standin):
        return {"url": f"{standin.url}/score", "wait_ms": 1.0}


class TestQueued(RewardConformance):
    plugin = "reward-service"
    variables = ("WFM_REWARD_ENQUEUE_URL", "WFM_REWARD_FETCH_URL", "WFM_REWARD_TOKEN")

    @pytest.fixture
    def options(self, queueing):
        queueing("good")
        return {"scorers": {"mean": 1.0}, "wait_ms": 1.0}
