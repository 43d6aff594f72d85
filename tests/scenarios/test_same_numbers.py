"""In lockstep a run has the same numbers whatever became of it: stopped and resumed, or laid out over four processes.

Rewards are a whim of the completion's bytes, so that every group has something to learn from the start.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine
from tests.runs import arithmetic

pytestmark = pytest.mark.timeout(400)

SETTINGS = (
    "warmup.steps=2",
    "run.steps=10",
    "sync.mode=sync",
    "evaluation.prompts=4",
    "evaluation.interval=5",
    "reward=[{plugin='whim'}]",
    "policy.prompts_per_step=4",
    "policy.checkpoint.interval=2",
    # Adam takes the sign of a gradient that is almost nothing: with a larger epsilon it takes its size.
    "policy.optimizer.eps=1e-4",
    "policy.optimizer.lr=1e-4",
    "rollout.group_size=4",
    "rollout.sampling.max_units=12",
    "rollout.precision=fp32",
    "rollout.replicas=2",
)


@pytest.fixture(scope="module")
def whole(cosmos: CommandLine, runs: Path) -> Path:
    """A run of one policy process, from beginning to end."""
    cosmos("run", *arithmetic("whole", *SETTINGS))
    return runs / "whole"


@pytest.fixture(scope="module")
def parts(cosmos: CommandLine, runs: Path) -> Path:
    """The same, interrupted and resumed."""
    process = cosmos.start("run", *arithmetic("parts", *SETTINGS))
    output = cosmos.interrupt_at(process, runs / "parts" / "checkpoints" / "step-6")
    assert process.returncode == 130, output
    assert "cosmos run --resume runs/parts" in output
    assert summary(runs / "parts")["steps"] < 12, "it was not interrupted, so nothing is proved"
    cosmos("run", "--resume", "runs/parts")
    return runs / "parts"


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def curve(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step that learned from rewards."""
    steps = replay(run / "journal.sqlite").steps
    found = [(step.metrics["loss"], step.metrics["grad_norm"]) for step in steps if step.stage == 1]
    assert len(found) == 10
    assert all(norm > 1e-3 for _, norm in found), "nothing was learned, so nothing is proved"
    return found


def test_a_resumed_run_tells_what_one_without_interruption_tells(whole: Path, parts: Path) -> None:
    first, second = summary(whole), summary(parts)
    for key in ("outcome", "steps", "evaluations", "staleness", "samples"):
        assert first[key] == second[key], key
    assert first["staleness"] == {"mean": 0.0, "max": 0}


def test_a_resumed_run_ends_with_the_very_same_weights(cosmos: CommandLine, whole: Path, parts: Path) -> None:
    for run in (whole, parts):
        cosmos("export", str(run), "--output", run.name)
    assert curve(parts) == curve(whole)
    exported = [(cosmos.folder / run.name / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert exported[0] == exported[1]


def test_four_processes_train_as_one(cosmos: CommandLine, runs: Path, whole: Path) -> None:
    cosmos("run", *arithmetic("pp-tp", *SETTINGS, "policy.mesh.pp=2", "policy.mesh.tp=2"))
    found, expected = curve(runs / "pp-tp"), curve(whole)
    differences = [abs(a - b) for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True)]
    assert max(differences) <= 1e-4, (found, expected)
