"""What the kit does not know of this reward: its details, its fences, and how asserts are reached."""

import subprocess
import sys

import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Prompt
from cosmos_reward_code.fences import program_in
from cosmos_reward_code.plugin import CodeOptions, CodeReward


def score(program, reference, **options):
    reward = CodeReward(CodeOptions(needs_fence=False, **options), RewardContext(name="code", seed=0))
    return reward.score(Completion(prompt=Prompt(text="?", reference=reference), text=program))


@pytest.mark.parametrize(
    ("program", "reference", "why"),
    [
        ("print(8)", {"stdin": "", "stdout": "7"}, "printed '8\\n'"),
        ("1 / 0", "assert True", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(0)", "assert True", "ended before the asserts"),
        ("raise SystemExit", "assert True", "ended before the asserts"),
        ("x = 1", "assert x == 2", "AssertionError"),
        ("import time; time.sleep(9)", "assert True", "time limit"),
        ("import os; os.abort()", "assert True", "signal SIGABRT"),
    ],
)
def test_the_details_say_what_went_wrong(program, reference, why):
    scored = score(program, reference, time_s=0.5)
    assert (scored.value, scored.details["why"]) == (0.0, why)


def test_white_space_at_the_ends_of_lines_is_no_mistake():
    assert score("print('1 ');print(2);print()", {"stdin": "", "stdout": "1\n2"}).value == 1.0
    assert score("print(' 1')", {"stdin": "", "stdout": "1"}).value == 0.0


def test_nothing_is_run_after_a_failure_unless_it_counts():
    cases = [{"stdin": "", "stdout": "1"}, {"stdin": "", "stdout": "2"}, {"stdin": "", "stdout": "2"}]
    assert score("print(2)", cases).details["passed"] == 0
    assert score("print(2)", cases, credit="fraction").value == 2 / 3


def test_the_main_guard_runs_with_input_and_not_before_asserts():
    program = "def f(): return 1\nif __name__ == '__main__':\n    print(f(), input())"
    assert score(program, {"stdin": "x", "stdout": "1 x"}).value == 1.0
    assert score(program, "assert f() == 1").value == 1.0


def test_the_last_block_is_the_program():
    text = "```python\na\n```\nNo:\n```py\nb\n```\n```text\nc\n```"
    assert program_in(text, needs_fence=True) == "b\n"
    assert program_in("a", needs_fence=True) is None
    assert program_in("```\na", needs_fence=True) is None
    assert program_in("a", needs_fence=False) == "a"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("x = 1", "asserts nothing, so that any program would pass"),
        ("assert (", "is no Python code"),
        ([], "an empty list"),
        ({"stdin": 1, "stdout": "1"}, "is no test case; give code with asserts"),
    ],
)
def test_an_unusable_reference_is_told_before_the_run(reference, message):
    reward = CodeReward(CodeOptions(), RewardContext(name="code", seed=0))
    with pytest.raises(DataError, match=message):
        reward.vet(Prompt(text="?", reference=reference))


def test_the_inside_of_the_sandbox_needs_the_standard_library_alone():
    code = (
        "import sys, cosmos_reward_code.confinement.program; "
        "sys.exit(bool({'attrs', 'cosmos_core'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
