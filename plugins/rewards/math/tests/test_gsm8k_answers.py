"""The reference answers of GSM8K: every one is right, and wrong once its final number is changed."""

import json
import os
from pathlib import Path

import pytest

from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Prompt
from cosmos_reward_math import MathOptions, MathReward

ROOT = Path(__file__).resolve().parents[4]


def gsm8k_answers():
    folder = Path(os.environ["COSMOS_DATA"]) if "COSMOS_DATA" in os.environ else ROOT.parent / "shared" / "data"
    path = folder / "gsm8k" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"GSM8K is not at {path}; set COSMOS_DATA to the folder that holds gsm8k/test.jsonl")
    return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_reference_answer_is_right_and_wrong_once_changed(subtests):
    for mode in ["math-verify", "final-number"]:
        with subtests.test(mode=mode):
            answers = gsm8k_answers()
            reward = MathReward(MathOptions(mode=mode), RewardContext(name="math", seed=0))
            wrong = []
            for answer in answers:
                working, _, number = answer.rpartition("####")
                prompt = Prompt(text="?", reference=number.strip())
                changed = f"{working}#### {int(number.replace(',', '')) + 1}"
                longer = f"{answer}0"
                values = [
                    reward.score(Completion(prompt=prompt, text=text)).value for text in (answer, changed, longer)
                ]
                # Zero with a digit more is zero still.
                if values != [1.0, 0.0, float(number.strip() == "0")]:
                    wrong.append((number, values))
            assert len(answers) == 1319
            assert wrong == []
