"""The same GRPO run in any layout: real processes, rollouts with the published weights, the same losses.

Rewards are a whim of the completion's bytes, so that every group has something to learn from the start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine
from tests.runs import WHIM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = (
    "warmup.steps=1",
    "run.steps=10",
    "sync.mode=sync",
    "evaluation.prompts=0",
    "reward=[{plugin='whim'}]",
    "policy.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.sampling.max_units=12",
    "rollout.precision=fp32",
    # Adam takes the sign of a gradient that is almost nothing: with a larger epsilon it takes its size.
    "policy.optimizer.eps=1e-4",
    "policy.optimizer.lr=1e-4",
    "policy.checkpoint.interval=0",
)
LAYOUTS = {"fsdp-cp": "dp_shard=2 cp=2"}
"""Those that the scenarios leave: these have `pp` and `tp`."""


def curve(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step that learned from rewards."""
    steps = replay(run / "journal.sqlite").steps
    return [(step.metrics["loss"], step.metrics["grad_norm"]) for step in steps if step.stage == 1]


def test_the_loss_curve_does_not_depend_on_the_layout(
    cosmos: CommandLine,
    arithmetic: Callable[..., list[str]],
    make_distribution: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_distribution("whim-reward", entries={"reward/whim": "whim"}, modules={"whim.py": WHIM})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    runs = cosmos.folder / "runs"
    cosmos("run", *arithmetic("alone", *SETTINGS))
    expected = curve(runs / "alone")
    assert len(expected) == 10
    assert all(norm > 1e-3 for _, norm in expected), "nothing was learned, so nothing is proved"
    for name, axes in LAYOUTS.items():
        cosmos("run", *arithmetic(name, *SETTINGS, *(f"policy.mesh.{axis}" for axis in axes.split())))
        found = curve(runs / name)
        differences = [abs(a - b) for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True)]
        assert max(differences) <= 1e-4, (name, found, expected)
