"""A run that makes videos is interrupted, and goes on where it was: no step is lost, and none is done twice."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_core.control.journal import replay
from cosmos_core.policy.checkpoints.checkpoint import completed
from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = Path(__file__).parents[3] / "recipes" / "wfm" / "wan-tiny-grpo-fast.toml"
WARMUP, STEPS, SAVED = 2, 6, 2


def cut(folder: Path) -> Path:
    """The demo of world models, for seconds, with its reward in the run's own processes."""
    recipe: dict[str, Any] = tomllib.loads(TINY.read_text())
    recipe["run"] |= {"name": "colours", "steps": STEPS}
    recipe["warmup"] |= {"steps": WARMUP, "prompts_per_step": 2}
    recipe["reward"] = [{"plugin": "colour"}]
    recipe["policy"] |= {"prompts_per_step": 2, "checkpoint": {"interval": SAVED}}
    recipe["rollout"]["group_size"] = 4
    recipe["evaluation"] = {"interval": 2, "prompts": 2}
    path = folder / "colours.toml"
    path.write_text(tomli_w.dumps(recipe))
    return path


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_ctrl_c_saves_a_checkpoint_that_the_run_goes_on_from(cosmos: CommandLine) -> None:
    cosmos.timeout_s = 400.0
    run = cosmos.folder / "runs" / "colours"
    process = cosmos.start("run", str(cut(cosmos.folder)))
    output = cosmos.interrupt_at(process, run / "checkpoints" / f"step-{SAVED}" / "complete.json")
    assert process.returncode == 130, output
    stopped = summary(run)
    assert (stopped["outcome"], stopped["planned_steps"]) == ("stopped", WARMUP + STEPS)
    assert SAVED <= stopped["steps"] < WARMUP + STEPS
    assert completed(str(run / "checkpoints"))[-1] == stopped["steps"]

    cosmos("run", "--resume", "runs/colours")
    finished = summary(run)
    assert (finished["outcome"], finished["steps"]) == ("finished", WARMUP + STEPS)
    state = replay(run / "journal.sqlite")
    assert [step.step for step in state.steps] == list(range(1, WARMUP + STEPS + 1))
    evaluated_at = [done.version for done in state.evaluations if done.score is not None]
    # One that was under way when the run was interrupted may be lacking: its weights are gone.
    assert {2, 8} <= set(evaluated_at) <= {2, 4, 6, 8}
    assert len(evaluated_at) == len(set(evaluated_at))
    told = cosmos("audit", "runs/colours")
    assert "2 start(s) of the controller" in told
    assert f"{WARMUP + STEPS} step(s) on record" in told
    assert "more were applied and then given up" not in told
    assert "was consumed exactly once" in told

    evaluated = cosmos("eval", "runs/colours")
    assert f"held-out reward {finished['heldout_reward_after']:.4f}" in evaluated
    assert "accuracy" not in evaluated
