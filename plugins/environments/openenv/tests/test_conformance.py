from __future__ import annotations

import pytest

from cosmos_core.testing import EnvironmentConformance
from cosmos_core.types import Prompt


class TestOpenEnv(EnvironmentConformance):
    plugin = "openenv"
    turns = ("hello", "<|im_end|>")
    examples = ((Prompt(text="Say it."), ["one", "two", "end"], ["one 1\n", "two 2\n", "end 3\n"]),)

    @pytest.fixture
    def options(self, server):
        return {
            "urls": [server.at(), server.at("another")],
            "action": {"message": "{text}"},
            "observation": "{observation.message} {observation.steps}\n",
        }


class TestOpenEnvOfJSON(EnvironmentConformance):
    plugin = "openenv"
    turns = ('I say {"message": "hello"}.', '{"massage": "hello"}', '{"message": ["\\u0000"]}', '{"message": "end"}')
    examples = (
        (
            Prompt(text="Say it."),
            ["hello", '{"message": 7}', 'So:\n```json\n{"message": "hello"}\n```'],
            [
                "no action: there is no JSON object\n",
                "no action: message: Input should be a valid string\n",
                '{"message": "hello", "steps": 2, "more": {"ok": true}} for 0.5',
            ],
        ),
    )

    @pytest.fixture
    def options(self, server):
        return {"urls": [server.at()], "observation": "{observation} for {reward}"}
