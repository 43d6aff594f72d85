"""Runs of the demo's recipe, cut down to seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cosmos_core.testing import CommandLine

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.toml"
SHORT = (
    "warmup.steps=12",
    "run.steps=8",
    "evaluation.prompts=16",
    "evaluation.interval=4",
    "tracking.hooks=[]",
    "rollout.max_in_flight=64",
)


@pytest.fixture
def cosmos(tmp_path: Path) -> Iterator[CommandLine]:
    """`cosmos` in a folder with modules that no process of a run may import."""
    for name in ("queue.py", "cosmos_algorithm_grpo.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current folder')\n")
    command = CommandLine(tmp_path)
    yield command
    left = command.left_behind()
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def arithmetic() -> Callable[..., list[str]]:
    """Arguments that run the demo's recipe, cut down, as `runs/<name>`."""

    def arguments(name: str, *overrides: str) -> list[str]:
        pairs = [argument for override in (*SHORT, *overrides) for argument in ("--set", override)]
        return [str(RECIPE), "--name", name, *pairs]

    return arguments
