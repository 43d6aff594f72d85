"""Sync mode: a run that was stopped while it learned from rewards, and resumed, ends with the very same weights.

The warm-up is long enough for some rewards to be 1, so that the steps after it learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from cosmos_core.control.journal import replay
from cosmos_core.testing import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = (
    "warmup.steps=150",
    "run.steps=10",
    "evaluation.interval=5",
    "sync.mode=sync",
    "policy.checkpoint.interval=2",
    "rollout.replicas=2",
)


def test_interrupted_and_resumed_equals_uninterrupted(
    cosmos: CommandLine, arithmetic: Callable[..., list[str]]
) -> None:
    runs = cosmos.folder / "runs"
    cosmos("run", *arithmetic("whole", *SETTINGS))
    process = cosmos.start("run", *arithmetic("parts", *SETTINGS))
    output = cosmos.interrupt_at(process, runs / "parts" / "checkpoints" / "step-154")
    assert process.returncode == 130, output
    assert "cosmos run --resume runs/parts" in output
    cosmos("run", "--resume", "runs/parts")
    assert "Nothing to resume" in cosmos("run", "--resume", "runs/parts")

    first, second = (json.loads((runs / name / "summary.json").read_text()) for name in ("whole", "parts"))
    for key in ("outcome", "steps", "evaluations", "staleness", "samples"):
        assert first[key] == second[key]
    assert first["staleness"] == {"mean": 0.0, "max": 0}
    learned = [record for record in replay(runs / "parts" / "journal.sqlite").steps if record.metrics["grad_norm"] > 0]
    assert any(record.stage == 1 for record in learned), "nothing was learned from rewards, so nothing is proved"
    for name in ("whole", "parts"):
        cosmos("export", f"runs/{name}", "--output", name)
    exported = [(cosmos.folder / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert exported[0] == exported[1]
