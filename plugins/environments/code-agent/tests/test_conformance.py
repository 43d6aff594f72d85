from __future__ import annotations

import json

import pytest

from cosmos_core.testing import AgentConformance
from cosmos_core.types import Message, Prompt, ToolCall


def call(name, **arguments):
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=json.dumps(arguments)),))


class TestCodeAgent(AgentConformance):
    plugin = "code-agent"
    replies = (
        call("run", code="print(add(2, 3))"),
        call("run", code="while True: print('x' * 99)"),
        call("write", source="def add(a, b): return a + b"),
        call("write", text=1),
        call("unknown"),
        Message(role="assistant", content="It adds, now."),
    )

    @pytest.fixture
    def options(self):
        return {"time_s": 10.0}

    @pytest.fixture
    def prompt(self):
        cases = [["add(2, 3)", "5"], ["add(1, 1)", "2"]]
        reference = {"source": "def add(a, b): return a - b", "examples": cases[:1], "tests": cases}
        return Prompt(text="Repair add.", reference=reference)
