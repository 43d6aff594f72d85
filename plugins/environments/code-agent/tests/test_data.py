"""The files of recipes/data are what their script writes, and hold tasks."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path

from cosmos_environment_code_agent.tasks import task_of

FOLDER = Path(__file__).parents[4] / "recipes" / "data"
FILES = ("repairs.jsonl", "repairs-heldout.jsonl", "python-repairs.jsonl", "python-repairs-heldout.jsonl")


def rows(name):
    return list(map(json.loads, (FOLDER / name).read_text().splitlines()))


def test_the_files_are_what_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["repairs.py", str(tmp_path)])
    runpy.run_path(str(FOLDER / "repairs.py"), run_name="__main__")
    assert [(tmp_path / name).read_bytes() for name in FILES] == [(FOLDER / name).read_bytes() for name in FILES]


def test_a_task_is_repaired_by_its_answer_and_not_as_it_is():
    values_of = runpy.run_path(str(FOLDER / "repairs.py"))["values_of"]
    for row in rows("python-repairs.jsonl") + rows("python-repairs-heldout.jsonl") + rows("repairs-heldout.jsonl"):
        task = task_of(row["task"])
        found = re.search(r'"source": ("[^"]*")', row["answer"])
        answer = json.loads(found[1]) if found else row["answer"]
        for cases in (task.examples, task.tests):
            calls, values = [each.call for each in cases], [each.value for each in cases]
            assert values_of(answer, calls) == values
        shown, wanted = [each.call for each in task.examples], [each.value for each in task.examples]
        assert values_of(task.source, shown) != wanted


def test_no_function_is_in_both_splits():
    def kinds(name):
        sources = [row["task"]["source"] for row in rows(name)]
        if name.startswith("python"):
            return {ast.parse(each).body[0].name for each in sources}
        return {re.sub(r" (//|[-+*%]) (?=[a-z])", " ? ", each) for each in sources}

    for train, heldout in (FILES[:2], FILES[2:]):
        assert kinds(train) & kinds(heldout) == set()
        assert len(kinds(heldout)) > 3
