from __future__ import annotations

import pytest

from cosmos_core.testing import AgentConformance, DatasetConformance
from cosmos_core.types import Message, Prompt

TASKSET = {"id": "vf_toy", "names": [str(number) for number in range(10, 60)]}


class TestVerifiers(AgentConformance):
    plugin = "verifiers"
    replies = (Message(role="assistant", content="12"), Message(role="assistant", content="10"))

    @pytest.fixture
    def options(self):
        return {"env": {"taskset": TASKSET}}

    @pytest.fixture
    def prompt(self):
        return Prompt(text="Guess.", metadata={"task": 2})


class TestTasks(DatasetConformance):
    plugin = "verifiers-tasks"

    @pytest.fixture
    def options(self):
        return {"taskset": TASKSET}
