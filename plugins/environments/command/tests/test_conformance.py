from __future__ import annotations

import sys

import pytest

from cosmos_core.testing import AgentConformance

PROGRAM = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": json.load(sys.stdin)["text"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(float("1904" in said))
"""


class TestCommand(AgentConformance):
    plugin = "command"

    @pytest.fixture
    def options(self):
        return {"command": [sys.executable, "-c", PROGRAM], "reward": True}
