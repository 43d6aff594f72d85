"""Algorithms learn in whole runs: from one warmed-up model, some steps each, on policy and with stale samples."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.commandline import CommandLine
from tests.processes import ForkedCommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
STEPS = 30
QUIET = ("evaluation.interval=0", "evaluation.prompts=128")
STALE = ("sync.interval=8", "sync.max_staleness=8")
RUNS = {
    "gspo": ("gspo", ()),
    "near-a-reference": ("reinforce-plus-plus", ("algorithm.options.kl_weight=0.01", "reference={}")),
    "corrected": ("tis", STALE),
    "criticised": ("ppo", ("critic.lr=1e-3",)),
}
CAREFUL = "dataset.options.careless=0.0"


def settings(*pairs: str) -> list[str]:
    return [argument for pair in (*QUIET, *pairs) for argument in ("--set", pair)]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A folder with `recipe.toml`: the demo without its warm-up, from weights that had it."""
    command = ForkedCommandLine(tmp_path_factory.mktemp("algorithms"), timeout_s=600.0)
    command("run", str(RECIPE), "--name", "warm", *settings("run.steps=1", "evaluation.prompts=0"))
    command("export", "runs/warm")
    recipe = tomllib.loads(RECIPE.read_text())
    del recipe["warmup"]
    recipe["model"] = {"plugin": "qwen", "path": str(command.folder / "runs" / "warm" / "export")}
    (command.folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    yield command
    assert not command.left_behind()


def summary_of(command: CommandLine, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((command.folder / "runs" / name / "summary.json").read_text())
    return found


@pytest.mark.parametrize("name", RUNS)
def test_it_learns(warmed_up: CommandLine, name: str) -> None:
    algorithm, chosen = RUNS[name]
    pairs = settings(f"run.steps={STEPS}", *chosen)
    warmed_up("run", "recipe.toml", "--name", name, "--algorithm", algorithm, *pairs)
    summary = summary_of(warmed_up, name)
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    assert after > before + 0.15, f"{before:.3f} before, {after:.3f} after"
    if name == "corrected":
        assert summary["staleness"]["max"] > 3


def test_preferences_are_learnt(warmed_up: CommandLine) -> None:
    chosen = settings(CAREFUL, "dataset.options.preferences=true", "reference={}", "policy.optimizer.lr=2e-4")
    warmed_up("run", "recipe.toml", "--name", "dpo", "--algorithm", "dpo", *chosen, "--set", "run.steps=25")
    summary = summary_of(warmed_up, "dpo")
    accuracy, margin = summary["measures"]["preference_accuracy"], summary["measures"]["preference_margin"]
    assert accuracy["first"] < 0.8
    assert accuracy["last"] > accuracy["first"] + 0.1
    assert margin["last"] > margin["first"] + 0.3


def test_the_policy_comes_near_its_teacher(warmed_up: CommandLine) -> None:
    teaching = settings(CAREFUL, "run.steps=80", "policy.optimizer.lr=2e-3", "evaluation.prompts=0")
    warmed_up("run", "recipe.toml", "--name", "teacher", "--algorithm", "sft", *teaching)
    warmed_up("export", "runs/teacher")
    teacher = str(warmed_up.folder / "runs" / "teacher" / "export")
    chosen = settings(f"teacher.path={teacher}", "run.steps=25", "rollout.group_size=1", "policy.prompts_per_step=64")
    warmed_up("run", "recipe.toml", "--name", "pupil", "--algorithm", "distill", *chosen)
    summary = summary_of(warmed_up, "pupil")
    distance = summary["measures"]["teacher_kl"]
    assert distance["last"] < 0.5 * distance["first"]
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"] + 0.15
