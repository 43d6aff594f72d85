"""Rewards that raise and that hang: a status on the sample, counted and shown, never a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commandline import CommandLine

SOURCE = """
import time
from cosmos_core.protocols import Provider, hookimpl

class Moody:
    def __init__(self, options, context):
        self.seen = 0

    def score(self, completion):
        number = sum(map(ord, completion.text + completion.prompt.text)) % 16
        if number == 0:
            time.sleep(60)
        if number < 4:
            raise ValueError("not in the mood")
        return float(number % 2)

@hookimpl
def cosmos_reward():
    return Provider(create=Moody)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_failing_rewards_are_counted_and_left_out(
    cosmos: CommandLine,
    arithmetic: Callable[..., list[str]],
    make_distribution: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_distribution("moody-reward", entries={"reward/moody": "moody"}, modules={"moody.py": SOURCE})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    reward = "reward=[{plugin='moody', timeout_s=0.3}]"
    output = cosmos("run", *arithmetic("moody", reward, "run.steps=3", "rollout.reward_workers=2"))
    run = cosmos.folder / "runs" / "moody"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    failed = summary["samples"]["dropped"]
    assert failed["reward_failed"] > 0
    assert failed["reward_timeout"] > 0
    assert "not in the mood" in output
    assert "reward_timeout" in output
    assert "reward_timeout" in (run / "report.html").read_text()
    samples = summary["samples"]
    assert samples["generated"] == samples["consumed"] + sum(samples["dropped"].values())
