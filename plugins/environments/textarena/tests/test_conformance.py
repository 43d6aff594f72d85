from __future__ import annotations

import pytest

from cosmos_core.testing import EnvironmentConformance
from cosmos_core.types import Prompt

pytest.importorskip("textarena", reason="the environment textarena needs textarena")

ONE_OF_PILE_1 = "[Player 1] [1 1]\nPlayer 1 removes 1 from pile 1.\n"


class TestTextArena(EnvironmentConformance):
    plugin = "textarena"
    turns = ("[0 1]", "I take\n[2 5]", "[0 9]")
    examples = (
        (
            Prompt(text="Play."),
            ["Hm.\n[0 3]", "[2 4]", "[2 1]", "[1 1]"],
            [
                f"Player 0 removes {mine}.\n{other}Current Pile:\n  pile 0: 0\n  pile 1: {first}\n  pile 2: {second}\n"
                for mine, other, first, second in [
                    ("3 from pile 0", ONE_OF_PILE_1, 3, 5),
                    ("4 from pile 2", ONE_OF_PILE_1, 2, 1),
                    ("1 from pile 2", ONE_OF_PILE_1, 1, 0),
                    ("1 from pile 1", "", 0, 0),
                ]
            ],
        ),
    )

    @pytest.fixture
    def options(self):
        moves = ["[0 1]", "[1 1]", "[2 1]"]
        return {"id": "Nim-v0", "opponent": "script", "moves": moves, "rules": False, "last_line": True}
