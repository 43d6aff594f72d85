from __future__ import annotations

import pytest

from cosmos_core.testing import EnvironmentConformance
from cosmos_core.types import Prompt


class TestCalculator(EnvironmentConformance):
    plugin = "calculator"
    turns = ("calc: 12*(3+4)=", "Let me see.\ncalc: 1/0=", "calc: " + "(" * 190)
    examples = ((Prompt(text="?"), ["calc: 12*(3+4)=", "#### 84"], ["84\n", None]),)


class TestCalculatorOfAnotherPrefix(EnvironmentConformance):
    plugin = "calculator"
    turns = ("= 2+2", "calc: 2+2=")
    examples = ((Prompt(text="?"), ["= 2+2"], ["4\n"]), (Prompt(text="?"), ["calc: 2+2="], [None]))

    @pytest.fixture
    def options(self):
        return {"prefix": "= "}
