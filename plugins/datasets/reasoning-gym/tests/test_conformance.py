"""Dataset and reward keep the protocols of their kinds."""

import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import DatasetConformance, RewardConformance
from cosmos_core.types import Prompt

ENTRY = {"question": "7 + 5 - 4 =", "answer": "8", "metadata": {}}


def completion(text, *, task="chain_sum", **parts):
    reference = {"task": task, "config": {"max_terms": 3}, "entry": ENTRY} | parts
    return Completion(prompt=Prompt(text="7 + 5 - 4 =\n", reference=reference), text=text)


class TestReasoningGym(DatasetConformance):
    plugin = "reasoning-gym"

    @pytest.fixture
    def options(self):
        return {"task": "chain_sum", "config": {"max_digits": 2}, "careless": 0.5}


class TestTasksInChats(DatasetConformance):
    plugin = "reasoning-gym"

    @pytest.fixture
    def options(self):
        # pool_matrix seeds numpy's global generator; the entries of graph_color have no answer.
        tasks = [{"task": "pool_matrix", "weight": 3.0}, {"task": "graph_color"}, {"task": "lcm"}]
        return {"tasks": tasks, "chat": True, "system": "Be brief.", "train_rows": 100, "heldout_rows": 20}


class TestScore(RewardConformance):
    plugin = "reasoning-gym-score"
    examples = (
        (completion("7 + 5 = 12\n<answer>8</answer>"), 1.0),
        (completion("<answer>\n+08.0 </answer> as I said"), 1.0),
        (completion("<answer>12</answer> no, <answer>8</answer>"), 1.0),
        (completion("<answer>8</answer> no, <answer>12</answer>"), 0.0),
        (completion("<answer>8 or 9</answer>"), 1 / 6),
        (completion("8"), 0.0),
        (completion("<answer>8"), 0.0),
        (completion("8</answer><answer>"), 0.0),
        (completion("<answer> </answer>"), 0.0),
        (completion(""), 0.0),
    )
    unscorable = (
        completion("<answer>8</answer>", task="chain_summ"),
        completion("<answer>eight</answer>", task="prime_factorization", config={}),
        completion("<answer>8</answer>", config={"max_term": 3}),
        completion("<answer>8</answer>", entry=None),
        Completion(prompt=Prompt(text="?", reference="8"), text="<answer>8</answer>"),
    )

    @pytest.fixture
    def completions(self):
        return [
            *(each for each, _ in self.examples),
            completion("<answer>" * 20_000),
            completion("</answer>" * 20_000),
            completion(f"<answer>{'9' * 20_000}</answer>"),
            completion("<answer>\0é😀\ud7ff</answer>"),
        ]
