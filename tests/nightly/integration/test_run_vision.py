"""A GRPO run on pictures: rollouts from what they show, rewards for what is said of it, training on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECIPE = Path(__file__).parents[3] / "recipes" / "grpo-vision.toml"
SETTINGS = ("run.steps=6", "evaluation.prompts=16", "policy.prompts_per_step=8", "sync.mode=sync")


def test_a_run_learns_from_rewards_for_pictures(cosmos: CommandLine) -> None:
    cosmos("run", str(RECIPE), *(argument for setting in SETTINGS for argument in ("--set", setting)))
    run = cosmos.folder / "runs" / "grpo-vision"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    steps = [step for step in replay(run / "journal.sqlite").steps if step.stage == 1]
    assert len(steps) == 6
    assert any(step.metrics["grad_norm"] > 0 for step in steps), "nothing was learned, so nothing is proved"
    # In lockstep the trainer finds what the engine said of each token: it sees the same pictures.
    for step in steps:
        if "mismatch_max_ratio" in step.metrics:
            assert step.metrics["mismatch_max_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert "mismatch_max_ratio" in steps[0].metrics
