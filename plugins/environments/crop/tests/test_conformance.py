from __future__ import annotations

import pytest

from cosmos_core.testing import DatasetConformance, EnvironmentConformance
from cosmos_core.testing.conformance.environment import Script
from cosmos_core.types import Prompt
from cosmos_environment_crop.boards import Board
from cosmos_environment_crop.pictures import data_url

PICTURE = data_url(Board(colour="red", column=1, row=2, left=0, top=0, size=5).picture())
ROW = Prompt(text="What colour is the board?", media=(PICTURE,))


class TestCrop(EnvironmentConformance):
    plugin = "crop"
    examples = ((ROW, ["crop b3", "crop e5", "#### red"], ["\n", "no part: a1 to d4\n", None]),)

    @pytest.fixture
    def scripts(self):
        turns = ("crop a1", "Let me see.\ncrop d4", "", "crop", "crop \x00\ud7ff", "crop " + "9" * 5000, "red")
        return tuple(Script(prompt=ROW, turns=(turn,) * 3) for turn in turns)


@pytest.mark.nightly
class TestBoards(DatasetConformance):
    plugin = "crop-boards"


@pytest.mark.nightly
class TestBoardsWithoutCrops(DatasetConformance):
    plugin = "crop-boards"

    @pytest.fixture
    def options(self):
        return {"crop": False, "heldout_rows": 0}
