"""Runs whose weights travel through process groups, and by a disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cosmos_core.control.journal import replay
from cosmos_core.testing import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = ("warmup.steps=4", "run.steps=4", "evaluation.interval=0", "evaluation.prompts=4", "rollout.replicas=2")


def logged(folder: Path, replica: str) -> Sequence[str]:
    """What a replica said of where its weights came from."""
    lines = [json.loads(line) for line in (folder / "logs" / f"{replica}.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if " comes " in line.get("message", "")]


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_a_run_gets_its_weights_as_the_recipe_says(
    cosmos: CommandLine, arithmetic: Callable[..., list[str]], tmp_path: Path, transport: str
) -> None:
    stored = tmp_path / "weights"
    way = [f"sync.transport={transport}", *([f"sync.directory='{stored}'"] if transport == "disk" else [])]
    cosmos("run", *arithmetic(transport, *SETTINGS, "policy.mesh.dp_shard=2", *way))
    folder = cosmos.folder / "runs" / transport
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "finished"
    state = replay(folder / "journal.sqlite")
    assert not any(replica.rejections for replica in state.replicas.values())
    said = f" from 2 part(s) in {stored}" if transport == "disk" else " over gloo from 2 process(es), tcp://"
    for replica in ("rollout-0", "rollout-1"):
        messages = logged(folder, replica)
        assert len(messages) >= 2
        assert all(said in message for message in messages)
    if transport == "disk":
        (run,) = stored.iterdir()
        kept = {int(version.name[1:].partition("-")[0]) for version in run.iterdir()}
        assert max(kept) == max(state.published)
        # Of the five that were published, those that somebody may still want.
        assert len(kept) <= 3


def test_the_plan_shows_and_checks_the_choice(cosmos: CommandLine, arithmetic: Callable[..., list[str]]) -> None:
    planned = " ".join(cosmos("plan", *arithmetic("planned")).split())
    assert "weights travel shared memory: launch.launcher 'local' starts every process" in planned
    refused = cosmos("plan", *arithmetic("refused", "sync.transport=nccl"), code=2)
    assert "sync.transport: 'nccl'" in refused
    assert "sync.directory" in cosmos("plan", *arithmetic("refused", "sync.transport=disk"), code=2)
