"""Both modes keep the protocol of rewards, on answers of all kinds."""

import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import RewardConformance
from cosmos_core.types import Prompt


def completion(text, reference):
    return Completion(prompt=Prompt(text="?", reference=reference), text=text)


RIGHT = [
    ("7+5=12\n12-4=8\n#### 8", "8"),
    ("#### 8.0", "8"),
    ("#### $70,000", "70000"),
    ("#### 70000", "70,000"),
    ("#### 8.", 8),
    ("#### 0.5", 0.5),
    ("#### 8", "so it is\n#### 8"),
]
WRONG = [
    ("8 apples at first\n#### 12", "8"),
    ("#### 8\n#### 12", "8"),
    ("####", "8"),
    ("", "8"),
    ("#### eight", "8"),
    ("#### 80", "8"),
    ("#### -8", "8"),
]
WRONG_TO_FINAL_NUMBER = [
    ("The answer is 8", "8"),
    ("#### 8 apples", "8"),
    ("#### 16/2", "8"),
    ("#### 0.333333", "0.3333333"),
]
RIGHT_TO_MATH_VERIFY = [
    (r"so \boxed{0.5}", "1/2"),
    ("#### 1/2", r"\frac{1}{2}"),
    ("The answer is $1+x$", "x+1"),
    ("The answer is 3.", "3"),
]
WRONG_TO_MATH_VERIFY = [(r"\boxed{\frac{}{}}", "5"), ("I do not know", "3")]
UNUSABLE = [None, "", "   ", True, ["8"], {"answer": 8}]


def examples(right, wrong):
    return [(completion(*case), 1.0) for case in right] + [(completion(*case), 0.0) for case in wrong]


class TestFinalNumber(RewardConformance):
    plugin = "math"
    examples = examples(RIGHT, WRONG + WRONG_TO_FINAL_NUMBER)
    unscorable = tuple(completion("#### 8", reference) for reference in [*UNUSABLE, "eight"])

    @pytest.fixture
    def options(self):
        return {"mode": "final-number"}


@pytest.mark.nightly
class TestMathVerify(RewardConformance):
    plugin = "math"
    examples = examples(RIGHT + RIGHT_TO_MATH_VERIFY, WRONG + WRONG_TO_MATH_VERIFY)
    unscorable = tuple(completion("#### 8", reference) for reference in UNUSABLE)
