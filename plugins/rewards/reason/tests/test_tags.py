"""How tags are read."""

import time

from cosmos_reward_reason.tags import read_tags


def test_the_only_answer(subtests):
    for text, answer in [
        ("<answer> a </answer>", "a"),
        ("<answer>a<answer>b</answer>", "a<answer>b"),
        ("</answer><answer>a</answer>", "a"),
        ("<answer>a</answer><answer>b", "a"),
        ("<answer>a</answer><answer>b</answer>", None),
        ("<answer>a", None),
        ("", None),
    ]:
        with subtests.test(text=text, answer=answer):
            assert read_tags(text).answer == answer


def test_a_completion_is_read_in_linear_time(subtests):
    for text in [
        "<answer>" * 100_000,
        "<think>" + "</think><answer>" * 50_000,
        "<think>" * 100_000,
        "<think></think><answer>" + " " * 1_000_000,
        " " * 1_000_000,
    ]:
        with subtests.test(text=text):
            began = time.process_time()
            assert not read_tags(text).is_well_formed
            assert time.process_time() - began < 1.0
