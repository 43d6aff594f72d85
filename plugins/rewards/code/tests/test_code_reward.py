"""What the kit does not know of this reward: its details, its fences, and how asserts are reached."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Prompt
from cosmos_reward_code import sandbox
from cosmos_reward_code.fences import program_in
from cosmos_reward_code.plugin import CodeOptions, CodeReward


def score(program, reference, **options):
    reward = CodeReward(CodeOptions(needs_fence=False, **options), RewardContext(name="code", seed=0))
    return reward.score(Completion(prompt=Prompt(text="?", reference=reference), text=program))


def test_the_details_say_what_went_wrong(subtests):
    for program, reference, why in [
        ("print(8)", {"stdin": "", "stdout": "7"}, "printed '8\\n'"),
        ("1 / 0", "assert True", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(0)", "assert True", "ended before the asserts"),
        ("raise SystemExit", "assert True", "ended before the asserts"),
        ("x = 1", "assert x == 2", "AssertionError"),
        ("import time; time.sleep(9)", "assert True", "time limit"),
        ("import os; os.abort()", "assert True", "signal SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", "assert True", "signal 40"),
    ]:
        with subtests.test(program=program, reference=reference, why=why):
            scored = score(program, reference, time_s=3.0)
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


def test_the_program_is_found_among_other_blocks(subtests):
    for text in [
        "Sample:\n```json\n{}\n```\nSo:\n```python\na\n  b\n```\n",
        "```Python title=x\na\n  b\n```\nIt prints\n```\n1\n```",
        "1. So:\n   ```python3\n   a\n     b\n   ```\n2. Done.",
        "````\na\n  b\n`````\n```text\nno\n```",
        "```\nno\n```\n```\na\n  b\n```",
        "```py\na\n  b\n```\n```python\nnever closed",
    ]:
        with subtests.test(text=text):
            assert program_in(text, needs_fence=True) == "a\n  b\n"
            assert program_in(text.replace("\n", "\r\n"), needs_fence=True) == "a\r\n  b\r\n"


def test_blocks_are_found_in_linear_time(subtests):
    for piece in ["```python\n", "```\n", " ", "`", "``` x", "``` "]:
        with subtests.test(piece=piece):
            began = time.process_time()
            program_in(piece * (1_000_000 // len(piece)) + "`x", needs_fence=True)
            assert time.process_time() - began < 3.0


def test_an_unusable_reference_is_told_before_the_run(subtests):
    for reference, message in [
        ("x = 1", "asserts nothing when it is run, so that any program would pass"),
        ("def check(f):\n    assert f(1) == 2", "asserts nothing when it is run"),
        ("if __name__ == '__main__':\n    assert f(1) == 2", "asserts nothing when it is run"),
        (
            "from __future__ import annotations\nassert f(1) == 2",
            "is no Python code to run after a program .from __fut",
        ),
        ("return\nassert f(1) == 2", "is no Python code"),
        ("assert (", "is no Python code"),
        ([], "an empty list"),
        ({"stdin": 1, "stdout": "1"}, "is no test case; give code with asserts"),
    ]:
        with subtests.test(reference=reference, message=message):
            reward = CodeReward(CodeOptions(), RewardContext(name="code", seed=0))
            with pytest.raises(DataError, match=message):
                reward.vet(Prompt(text="?", reference=reference))


def test_asserts_of_a_function_count_where_it_is_called():
    check = "def check(f):\n    assert f(1) == 2\n\ncheck(add)"
    assert score("def add(n): return n + 1", check).value == 1.0
    assert score("def add(n): return n", check).value == 0.0


def test_what_is_left_after_the_time_of_all_test_cases_is_failed(monkeypatch):
    """On the reward's clock each takes 30 s."""
    now, limits_s = [0.0], []

    def run(program, given, limits, *, name):
        limits_s.append(limits.time_s)
        now[0] += 30.0
        return sandbox.run(program, given, limits, name=name)

    monkeypatch.setattr("cosmos_reward_code.plugin.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("cosmos_reward_code.plugin.sandbox", SimpleNamespace(run=run, Limits=sandbox.Limits))
    cases = [{"stdin": each, "stdout": "1"} for each in ("", "", "x", "", "", "")]
    program = "import sys\nif sys.stdin.read(): import time; time.sleep(99)\nprint(1)"
    scored = score(program, cases, credit="fraction", time_s=40.0, total_s=60.5)
    assert limits_s == [40.0, 30.5, 0.5]
    assert (scored.value, scored.details["why"]) == (2 / 6, "time limit")


def test_the_inside_of_the_sandbox_needs_the_standard_library_alone():
    code = (
        "import sys, cosmos_reward_code.confinement.program; "
        "sys.exit(bool({'attrs', 'cosmos_core'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
