"""GRPO on pictures and videos: rollouts from what they show, rewards for what is said of it, training on both."""

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


REASON = RECIPE.parent / "reason" / "reason-tiny.toml"
TWO_STAGES = (
    "warmup.steps=60",
    "warmup.optimizer.warmup_steps=5",
    "run.steps=12",
    "policy.checkpoint.interval=4",
    "policy.checkpoint.keep=99",
    "policy.prompts_per_step=4",
    "evaluation.prompts=8",
    "sync.mode=sync",
)


def test_questions_about_videos_are_learned_in_two_stages_each_of_which_can_be_interrupted(cosmos: CommandLine) -> None:
    run = cosmos.folder / "runs" / "reason-tiny"
    settings = [argument for setting in TWO_STAGES for argument in ("--set", setting)]
    stopped = []
    for arguments, step in ((("run", str(REASON), *settings), 4), (("run", "--resume", str(run)), 64)):
        cosmos.interrupt_at(cosmos.start(*arguments), run / "checkpoints" / f"step-{step}")
        stopped.append(len(replay(run / "journal.sqlite").steps))
    cosmos("run", "--resume", str(run))
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
    steps = replay(run / "journal.sqlite").steps
    assert [step.stage for step in steps] == [0] * 60 + [1] * 12
    assert 4 <= stopped[0] < 60 < stopped[1] < 72, "each stage was interrupted, and none begun again"
    # What the demonstrator's mistakes are is of no concern to imitation: its loss falls.
    losses = [step.metrics["loss"] for step in steps[:60]]
    assert losses[-1] < losses[0] / 2
    assert any(step.metrics["grad_norm"] > 0 for step in steps[60:]), "nothing was learned, so nothing is proved"
