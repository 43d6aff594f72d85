"""Each reward keeps the protocol of rewards."""

import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import RewardConformance
from cosmos_core.types import Prompt

pytestmark = pytest.mark.nightly


def completion(text, reference="8", num_units=None, **metadata):
    return Completion(prompt=Prompt(text="?", reference=reference, metadata=metadata), text=text, num_units=num_units)


def examples(right, wrong):
    return [(completion(*each), 1.0) for each in right] + [(completion(*each), 0.0) for each in wrong]


UNUSABLE = tuple(completion("8", reference) for reference in (None, True, "", [], [None], {"answer": "8"}))


class TestExact(RewardConformance):
    plugin = "exact"
    examples = examples(
        [("8",), (" 8\n",), ("8", 8), ("8", 8.0), ("8.0", 8.0), ("0.5", 0.5), ("b", ["a", "b"])],
        [("9",), ("",), ("8.0",), ("#### 8",), ("08",)],
    )
    unscorable = UNUSABLE


class TestRegex(RewardConformance):
    plugin = "regex"
    examples = examples(
        [("is 8", "8"), ("IS 1.5", 1.5), ("is (8", "(8"), ("is 8\n", " 8 ")],
        [("is 80", "8"), ("is 1x5", 1.5), ("", "8")],
    )
    unscorable = tuple(each for each in UNUSABLE if each.prompt.reference != ["8"])

    @pytest.fixture
    def options(self):
        return {"pattern": r"is {reference}(?!\d)", "ignore_case": True}


class TestFormat(RewardConformance):
    plugin = "format"
    examples = examples(
        [("<think>a < b</think>\n<answer>8</answer>\n",), ("<think>a</think><answer>b</answer>", None)],
        [
            ("<answer>8</answer><think>a</think>",),
            ("<think>a<answer>8</answer></think>",),
            ("<think>a</think><answer>8",),
            ("<think>a</think><answer>8</answer><answer>9</answer>",),
            ("So <think>a</think><answer>8</answer>",),
            ("<think>a</think> so <answer>8</answer>",),
            ("<think> </think><answer>8</answer>",),
        ],
    )


class TestLength(RewardConformance):
    plugin = "length"
    examples = tuple(
        (completion("", num_units=length), score)
        for length, score in [(0, 0.0), (90, 0.0), (91, -0.1), (95, -0.5), (100, -1.0), (101, -1.0), (10**6, -1.0)]
    )
    unscorable = (completion("8"),)

    @pytest.fixture
    def options(self):
        return {"longest": 100, "buffer": 10}


SCHEMA = {
    "type": "object",
    "required": ["answer"],
    "properties": {"answer": {"$ref": "#/$defs/n"}},
    "$defs": {"n": {"type": "integer"}},
}


class TestJsonSchema(RewardConformance):
    plugin = "json-schema"
    examples = examples(
        [('{"answer": 8}',), (' {"answer": 8, "a": null}\n',)], [('{"answer": "8"}',), ("{}",), ("8",), ("",)]
    )

    @pytest.fixture
    def options(self):
        return {"schema": SCHEMA}
