"""Both rewards keep the protocol, on answers of all kinds."""

import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import RewardConformance
from cosmos_core.types import Prompt

pytestmark = pytest.mark.nightly

CHOICES = {"choice": "B", "choices": {"A": "it falls.", "B": "It stays", "C": "It rises"}}


def completion(text, reference):
    return Completion(prompt=Prompt(text="?", reference=reference), text=text)


def tagged(answer):
    return f"<think>Well.</think> <answer>{answer}</answer>"


RIGHT = [
    (tagged("A car"), {"choice": "B", "choices": {"A": "b", "B": "a car", "C": "a"}}),
    (tagged("b"), {"choice": "B", "choices": {"A": "b", "B": "a car", "C": "a"}}),
    (tagged("B"), CHOICES),
    (tagged(" (b) "), CHOICES),
    (tagged("B."), CHOICES),
    (tagged("B: it  stays."), CHOICES),
    (tagged("it stays"), CHOICES),
    ("no thought <answer>B</answer>", CHOICES),
    (tagged("a red\ncup."), ["A red cup", "red cup"]),
    (tagged("8"), "8"),
]
SWAPPED = {"choice": "B", "choices": {"A": "b", "B": "a car", "C": "a"}}
WRONG = [
    (tagged("C"), SWAPPED),
    (tagged("a"), SWAPPED),
    (tagged("A car"), SWAPPED | {"choice": "A"}),
    (tagged("A"), CHOICES),
    (tagged("B: it rises"), CHOICES),
    (tagged("A or B"), CHOICES),
    (tagged("Both"), CHOICES),
    (tagged(""), CHOICES),
    ("B", CHOICES),
    (tagged("A") + tagged("B"), CHOICES),
    ("<answer>B", CHOICES),
    (tagged("cup"), ["A red cup"]),
]
UNUSABLE = [None, 8, [], [""], ["x", 3], {"choice": "D", "choices": {"A": "x"}}, {"choice": "A"}, True]


class TestAccuracy(RewardConformance):
    plugin = "reason-accuracy"
    examples = tuple((completion(*case), value) for cases, value in ((RIGHT, 1.0), (WRONG, 0.0)) for case in cases)
    unscorable = tuple(completion(tagged("B"), reference) for reference in UNUSABLE)


class TestAccuracyOfBareAnswers(RewardConformance):
    plugin = "reason-accuracy"
    examples = ((completion(" B\n", CHOICES), 1.0), (completion("C", CHOICES), 0.0), (completion("", CHOICES), 0.0))
    unscorable = (completion("B", None),)

    @pytest.fixture
    def options(self):
        return {"tags": False}


class TestFormat(RewardConformance):
    plugin = "reason-format"
    reference_is_optional = True
    examples = (
        (completion(tagged("B"), None), 1.0),
        (completion("\n<think>a\nb</think>\n<answer>\nB\n</answer>\n", None), 1.0),
        (completion("B", None), 0.0),
        (completion("So: " + tagged("B"), None), 0.0),
        (completion(tagged("B") + " Done.", None), 0.0),
        (completion("<think> </think><answer>B</answer>", None), 0.0),
        (completion("<think>a</think><answer> </answer>", None), 0.0),
        (completion("<think>a<think>b</think></think><answer>B</answer>", None), 0.0),
        (completion("<answer>B</answer><think>a</think>", None), 0.0),
        (completion(tagged("B") + tagged("B"), None), 0.0),
    )
