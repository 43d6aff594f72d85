"""The reward keeps the protocol of rewards, on programs of all kinds."""

import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import RewardConformance
from cosmos_core.types import Message, Prompt

ADDS = "a, b = map(int, input().split())\nprint(a + b)"
CASES = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "1 -1\n", "stdout": "0\n"}]
FUNCTION = "def add(a, b):\n    return a + b"
ASSERTS = "assert add(3, 4) == 7\nassert add(1, -1) == 0"


def fenced(program, language="python"):
    return f"So:\n```{language}\n{program}\n```\n"


def completion(text, reference, turns=None):
    turns = turns or (Message(role="assistant", content=text),)
    return Completion(prompt=Prompt(text="Add.", reference=reference), text=text, turns=turns)


UNUSABLE = [None, "", "8", "add(", [], [8], {"stdin": "3"}, {"stdin": "3", "stdout": 3}, True]


class TestAll(RewardConformance):
    plugin = "code"
    examples = (
        (completion(fenced(ADDS), CASES), 1.0),
        (completion(fenced(ADDS, ""), CASES[0]), 1.0),
        (completion(fenced(FUNCTION), ASSERTS), 1.0),
        (completion(fenced(ADDS.replace("+", "*")), CASES), 0.0),
        (completion(fenced("print(7)"), CASES), 0.0),
        (completion(fenced(FUNCTION.replace("+", "-")), ASSERTS), 0.0),
        (completion(FUNCTION, ASSERTS), 0.0),
    )
    unscorable = tuple(completion(fenced(ADDS), reference) for reference in UNUSABLE)

    @pytest.fixture
    def completions(self):
        tool = (
            Message(role="assistant", content=fenced("print(8)")),
            Message(role="tool", content=fenced(ADDS)),
            Message(role="assistant", content="As the tool says."),
        )
        return [
            completion("", ASSERTS),
            completion(fenced("\x00\x1b"), ASSERTS),
            completion(fenced("Ответ = '世界'\nprint(Ответ)"), CASES),
            completion("```python\nprint(", CASES),
            completion(fenced(FUNCTION), [ASSERTS, CASES[0]]),
            completion("".join(turn.content for turn in tool), CASES, tool),
        ]


@pytest.mark.nightly
class TestFraction(TestAll):
    examples = (
        (completion(fenced(ADDS), CASES), 1.0),
        (completion(fenced("print(7)"), CASES), 0.5),
        (completion(fenced(FUNCTION), [ASSERTS, "assert add(1, 1) == 3"]), 0.5),
        (completion(ADDS, CASES), 1.0),
    )
    unscorable = ()

    @pytest.fixture
    def options(self):
        return {"credit": "fraction", "needs_fence": False}

    @pytest.fixture
    def completions(self):
        return [completion(fenced("print(0)"), CASES), completion("x", CASES)]
