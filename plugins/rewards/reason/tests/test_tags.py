"""How tags are read."""

import time

import pytest

from cosmos_reward_reason.tags import read_tags


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> a </answer>", "a"),
        ("<answer>a<answer>b</answer>", "a<answer>b"),
        ("</answer><answer>a</answer>", "a"),
        ("<answer>a</answer><answer>b", "a"),
        ("<answer>a</answer><answer>b</answer>", None),
        ("<answer>a", None),
        ("", None),
    ],
)
def test_the_only_answer(text, answer):
    assert read_tags(text).answer == answer


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 100_000,
        "<think>" + "</think><answer>" * 50_000,
        "<think>" * 100_000,
        "<think></think><answer>" + " " * 1_000_000,
        " " * 1_000_000,
    ],
)
def test_a_completion_is_read_in_linear_time(text):
    began = time.process_time()
    assert not read_tags(text).is_well_formed
    assert time.process_time() - began < 1.0
