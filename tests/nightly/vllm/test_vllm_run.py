"""The arithmetic recipe with real vLLM as its engine: `cosmos run`, weights loaded while sequences are in flight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commandline import CommandLine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
STEPS = 5
SETTINGS = (
    "rollout.engine.plugin=vllm",
    "model.config.head_dim=32",
    "warmup.steps=8",
    f"run.steps={STEPS}",
    "evaluation.prompts=8",
    "evaluation.interval=3",
    "rollout.max_in_flight=64",
)


def test_a_run_generates_with_vllm_and_trains_on_it(tmp_path):
    cosmos = CommandLine(tmp_path, timeout_s=360.0)
    cosmos("run", str(RECIPE), "--name", "on-vllm", *(part for each in SETTINGS for part in ("--set", each)))
    assert not cosmos.left_behind()
    run = tmp_path / "runs" / "on-vllm"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    samples = summary["samples"]
    assert samples["consumed"] == STEPS * 16 * 8
    assert samples["generated"] == samples["consumed"] + sum(samples["dropped"].values())
    assert summary["staleness"]["max"] <= 3
    for log in (run / "logs").glob("*.jsonl"):
        assert '"ERROR"' not in log.read_text(), log.read_text()
