"""What the kit does not know of this reward: its messages and details, and what it imports and logs."""

import logging
import subprocess
import sys
import threading

import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Message, Prompt
from cosmos_reward_math import MathOptions, MathReward


def score(text, reference, mode="math-verify"):
    reward = MathReward(MathOptions(mode=mode), RewardContext(name="math", seed=0))
    return reward.score(Completion(prompt=Prompt(text="?", reference=reference), text=text))


def test_an_unusable_reference_is_told_with_what_to_do(subtests):
    for mode, message in [
        ("math-verify", r"mode math-verify: the reference \['8'\] cannot be read as mathematics; check the dataset's"),
        (
            "final-number",
            r"mode final-number: the reference \['8'\] is no number; give the dataset a reference pattern",
        ),
    ]:
        with subtests.test(mode=mode, message=message), pytest.raises(DataError, match=message):
            score("#### 8", ["8"], mode)


def test_math_verify_works_off_the_main_thread_and_is_quiet(caplog):
    values = []
    with caplog.at_level(logging.WARNING):
        worker = threading.Thread(target=lambda: values.append(score("#### 8", "8").value))
        worker.start()
        worker.join()
    assert values == [1]
    assert caplog.records == []


def test_the_details_show_the_answer():
    assert score("x\n#### 9", "8", "final-number").details == {"answer": "9"}


def test_math_verify_is_the_default():
    assert MathOptions().mode == "math-verify"


def test_selecting_the_strict_mode_imports_neither_sympy_nor_torch():
    code = (
        "import sys; from cosmos_reward_math import MathOptions, MathReward; "
        "MathReward(MathOptions(mode='final-number'), None); sys.exit(bool({'torch', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_tool_said_is_no_answer(subtests):
    for mode in ["final-number", "math-verify"]:
        with subtests.test(mode=mode):
            turns = tuple(
                Message(role=role, content=text)
                for role, text in (("assistant", "#### 9"), ("tool", "#### 8"), ("assistant", "As the tool says."))
            )
            dialogue = Completion(
                prompt=Prompt(text="?", reference="8"), text="".join(turn.content for turn in turns), turns=turns
            )
            reward = MathReward(MathOptions(mode=mode), RewardContext(name="math", seed=0))
            assert reward.score(dialogue).value == 0.0
