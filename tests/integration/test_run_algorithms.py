"""Algorithms learn in whole runs: from one warmed-up model, some steps each, on policy and with stale samples."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from cosmos_core.testing import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.toml"
STEPS = 30
QUIET = ("tracking.hooks=[]", "evaluation.interval=0", "evaluation.prompts=128")
STALE = ("sync.interval=8", "sync.max_staleness=8")
RUNS = {
    "gspo": ("gspo", ()),
    "near-a-reference": ("reinforce-plus-plus", ("algorithm.options.kl_weight=0.01", "reference={}")),
    "corrected": ("tis", STALE),
}


def settings(*pairs: str) -> list[str]:
    return [argument for pair in (*QUIET, *pairs) for argument in ("--set", pair)]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A folder with `recipe.toml`: the demo without its warm-up, from weights that had it."""
    command = CommandLine(tmp_path_factory.mktemp("algorithms"), timeout_s=600.0)
    command("run", str(RECIPE), "--name", "warm", *settings("run.steps=1", "evaluation.prompts=0"))
    command("export", "runs/warm")
    recipe = tomllib.loads(RECIPE.read_text())
    del recipe["warmup"]
    recipe["model"] = {"plugin": "qwen", "path": str(command.folder / "runs" / "warm" / "export")}
    (command.folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    yield command
    assert not command.left_behind()


@pytest.mark.parametrize("name", RUNS)
def test_it_learns(warmed_up: CommandLine, name: str) -> None:
    algorithm, chosen = RUNS[name]
    pairs = settings(f"run.steps={STEPS}", *chosen)
    warmed_up("run", "recipe.toml", "--name", name, "--algorithm", algorithm, *pairs)
    summary = json.loads((warmed_up.folder / "runs" / name / "summary.json").read_text())
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    assert after > before + 0.15, f"{before:.3f} before, {after:.3f} after"
    if name == "corrected":
        assert summary["staleness"]["max"] > 3
