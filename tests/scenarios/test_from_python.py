"""A script that trains with its own function: interrupted, looked at, its model loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commandline import CommandLine
from tests.runs import RECIPE

SCRIPT = f"""
import cosmos_core as cosmos

LONGEST = 60


def brevity(prompt, completion, reference, *, power: float = 1.0):
    print("scored", len(completion))
    return max(0.0, 1 - len(completion) / LONGEST) ** power


run = cosmos.train({str(RECIPE)!r}, reward=brevity, warmup__steps=4, run={{"name": "script", "steps": 5000}},
                   evaluation__prompts=8, policy__checkpoint__interval=5000)
while len(run.metrics()) < 8:
    pass
print("asked to stop:", run.stop())
"""


@pytest.fixture(scope="module")
def run(cosmos: CommandLine, runs: Path) -> Path:
    script = cosmos.folder / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", script]
    done = subprocess.run(
        command, cwd=cosmos.folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert "asked to stop: stopped" in done.stdout, done.stdout + done.stderr
    return runs / "script"


def test_its_function_is_kept_and_scored(run: Path) -> None:
    (kept,) = run.glob("plugins/*/brevity.py")
    assert "LONGEST = 60" in kept.read_text()
    assert "train(" not in kept.read_text()
    assert "scored" in (run / "logs" / "rollout-0.log").read_text()


def test_it_is_found_again_with_its_figures_and_its_model(run: Path) -> None:
    import cosmos_core as cosmos

    found = cosmos.open(run)
    rows = found.metrics().to_dict("records")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert 0.0 < rows[-1]["reward/mean"] < 1.0
    assert found.evaluations().to_dict("records")[0]["step"] == 4
    kept = found.samples(purpose="train").to_dict("records")
    assert {each["fate"] for each in kept} >= {"trained"}
    assert all(each["reward"] == 1 - len(each["completion"]) / 60 for each in kept if len(each["completion"]) < 60)
    assert found.summary()["outcome"] == found.wait() == "stopped"
    assert (found.model() / "config.json").exists()
