from __future__ import annotations

import pytest

from cosmos_core.testing import AgentConformance
from cosmos_core.types import Message, ToolCall


def call(arguments, name="calculate"):
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


class TestOpenAIAgents(AgentConformance):
    plugin = "openai-agents"
    replies = (
        call('{"expression": "34*56"}'),
        call('{"expression": "34*"}'),
        call('{"wrong": 1}'),
        call("no JSON"),
        call("{}", "unknown"),
        Message(role="assistant", content="#### 1904"),
    )

    @pytest.fixture
    def options(self):
        return {"agent": "cosmos_environment_openai_agents.calculator:calculator"}
