"""A world model learns from videos, and then from a reward for their colour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine

pytestmark = pytest.mark.timeout(400)

RECIPE = Path(__file__).parents[2] / "recipes" / "wfm" / "wan-tiny-grpo-fast.toml"
SHORT = (
    "warmup.steps=120",
    "run.steps=16",
    "evaluation.prompts=16",
    "evaluation.interval=0",
    "rollout.group_size=8",
    "reward=[{plugin='colour'}]",
)


@pytest.fixture(scope="module")
def run(cosmos: CommandLine, runs: Path) -> Path:
    """The folder of a run that has finished."""
    cosmos("run", str(RECIPE), *(argument for setting in SHORT for argument in ("--set", setting)))
    return runs / "wan-tiny-grpo-fast"


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_its_reward_rises(summary: dict[str, Any]) -> None:
    assert summary["outcome"] == "finished"
    before, after = summary["heldout_reward_before"], summary["heldout_reward_after"]
    print(f"{before:.3f} before, {after:.3f} after")
    assert after > before + 0.1


def test_the_trainer_prices_a_sample_as_its_engine_did(run: Path) -> None:
    steps = [step for step in replay(run / "journal.sqlite").steps if step.stage == 1]
    # Samples of weights that are trained have log-probs to which the trainer's are equal; stale ones meet the clip.
    assert steps[0].metrics["mismatch_max_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < max(step.metrics["clip_fraction"] for step in steps) < 0.95


def test_its_report_shows_videos(run: Path) -> None:
    assert "data:image/webp" in (run / "report.html").read_text()
