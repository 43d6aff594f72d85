"""Both modes on answers of all kinds."""

import logging
import subprocess
import sys
import threading

import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Prompt
from cosmos_reward_math import MathOptions, MathReward
from cosmos_reward_math.plugin import cosmos_reward

CONTEXT = RewardContext(name="math", seed=0)


def score(mode, text, reference):
    reward = MathReward(MathOptions(mode=mode), CONTEXT)
    return reward.score(Completion(prompt=Prompt(text="?", reference=reference), text=text)).value


@pytest.mark.parametrize("mode", ["math-verify", "final-number"])
@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        ("7+5=12\n12-4=8\n#### 8", "8", 1),
        ("#### 8.0", "8", 1),
        ("#### $70,000", "70000", 1),
        ("#### 70000", "70,000", 1),
        ("#### 8.", 8, 1),
        ("#### 0.5", 0.5, 1),
        ("#### 8", "so it is\n#### 8", 1),
        ("8 apples at first\n#### 12", "8", 0),
        ("#### 8\n#### 12", "8", 0),
        ("####", "8", 0),
        ("", "8", 0),
        ("#### eight", "8", 0),
        ("#### 80", "8", 0),
        ("#### -8", "8", 0),
    ],
)
def test_both_modes(mode, text, reference, value):
    assert score(mode, text, reference) == value


def test_final_number_is_strict():
    assert score("final-number", "The answer is 8", "8") == 0
    assert score("final-number", "#### 8 apples", "8") == 0
    assert score("final-number", "#### 16/2", "8") == 0
    assert score("final-number", "#### 0.333333", "0.3333333") == 0


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        (r"so \boxed{0.5}", "1/2", 1),
        ("#### 1/2", r"\frac{1}{2}", 1),
        ("The answer is $1+x$", "x+1", 1),
        ("The answer is 3.", "3", 1),
        (r"\boxed{\frac{}{}}", "5", 0),
        ("I do not know", "3", 0),
    ],
)
def test_math_verify_compares_mathematics(text, reference, value):
    assert score("math-verify", text, reference) == value


@pytest.mark.parametrize("mode", ["math-verify", "final-number"])
@pytest.mark.parametrize("reference", [None, "", "   ", True, ["8"], {"answer": 8}])
def test_an_unusable_reference_is_an_error_never_a_number(mode, reference):
    with pytest.raises(DataError, match=f"mode {mode}: the reference"):
        score(mode, "#### 8", reference)


def test_final_number_refuses_a_reference_in_words():
    with pytest.raises(DataError, match="'eight' is no number"):
        score("final-number", "#### 8", "eight")


def test_math_verify_works_off_the_main_thread_and_is_quiet(caplog):
    values = []
    with caplog.at_level(logging.WARNING):
        worker = threading.Thread(target=lambda: values.append(score("math-verify", "#### 8", "8")))
        worker.start()
        worker.join()
    assert values == [1]
    assert caplog.records == []


def test_the_details_show_the_answer():
    reward = MathReward(MathOptions(mode="final-number"), CONTEXT)
    assert reward.score(Completion(prompt=Prompt(text="?", reference="8"), text="x\n#### 9")).details == {"answer": "9"}


def test_the_provider():
    provider = cosmos_reward()
    assert provider.options().mode == "math-verify"
    assert provider.capabilities.deterministic


def test_selecting_the_strict_mode_imports_neither_sympy_nor_torch():
    code = (
        "import sys; from cosmos_reward_math import MathOptions, MathReward; "
        "MathReward(MathOptions(mode='final-number'), None); sys.exit(bool({'torch', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
