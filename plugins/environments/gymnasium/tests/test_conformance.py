from __future__ import annotations

import pytest

from cosmos_core.testing import EnvironmentConformance
from cosmos_core.types import Prompt


class TestGymnasium(EnvironmentConformance):
    plugin = "gymnasium"
    turns = ("right", "fly")
    examples = (
        (
            Prompt(text="Cross the ice."),
            ["down", "DOWN", "fly", "down", "right", "right", "right"],
            ["at 4\n", "at 8\n", "no action: one of left, down, right, up\n", "at 12\n"],
        ),
    )

    @pytest.fixture
    def options(self):
        return {
            "id": "FrozenLake-v1",
            "arguments": {"is_slippery": False},
            "actions": ["left", "down", "right", "up"],
            "observation": "at {observation}\n",
        }
