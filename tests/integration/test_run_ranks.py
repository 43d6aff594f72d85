"""A run whose rollout replica splits the model over two processes, and what becomes of it when one is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import msgspec
import psutil
import pytest

from cosmos_core.controller.journal import entries
from cosmos_core.testing import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = ("warmup.steps=40", "run.steps=3", "sync.mode=sync", "evaluation.prompts=0")


def trained(cosmos: CommandLine, name: str) -> list[dict[str, float]]:
    """What each step of a run was told of, by its metrics."""
    reports = [
        event.report
        for _, _, event in entries(cosmos.folder / "runs" / name / "journal.sqlite")
        if isinstance(getattr(event, "report", None), bytes)
    ]
    decoded = [msgspec.msgpack.decode(report) for report in reports]
    return [fields["metrics"] for kind, fields in decoded if kind == "StepDone"]


def test_it_trains_as_with_one_process(cosmos: CommandLine, arithmetic: Callable[..., list[str]]) -> None:
    for name, size in (("alone", 1), ("spread", 2)):
        cosmos("run", *arithmetic(name, *SETTINGS, f"rollout.mesh.tp={size}"))
        assert json.loads((cosmos.folder / "runs" / name / "summary.json").read_text())["outcome"] == "finished"
    alone, spread = trained(cosmos, "alone"), trained(cosmos, "spread")
    assert len(alone) == 43
    assert alone[-1]["trained_sequences"] > 0
    for one, other in zip(alone, spread, strict=True):
        assert one["units"] == other["units"]
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert spread[-1]["mismatch_max_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert followers(cosmos) == []


def followers(cosmos: CommandLine) -> list[psutil.Process]:
    """Ranks after the first of the engines of these runs."""
    found = psutil.process_iter(["cmdline", "cwd"])
    return [
        each
        for each in found
        if "cosmos_core.rollout.embedded.ranks.follower" in (each.info["cmdline"] or ())
        and (each.info["cwd"] or "").startswith(str(cosmos.folder))
    ]


def test_a_killed_rank_ends_the_run_and_is_named(cosmos: CommandLine, arithmetic: Callable[..., list[str]]) -> None:
    running = cosmos.start("run", *arithmetic("killed", "run.steps=2000", "warmup.steps=2", "rollout.mesh.tp=2"))
    deadline = time.monotonic() + 200
    while not (found := followers(cosmos)) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(5)
    os.kill(found[0].pid, signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "rank 1 of the 2 ranks of the engine ended: signal SIGKILL" in " ".join(said.split())
    assert followers(cosmos) == []
