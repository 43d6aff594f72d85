"""A run whose rollout replica splits the model over two processes, and what becomes of it when one is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import msgspec
import psutil
import pytest

from cosmos_core.control.journal import entries
from cosmos_core.testing import CommandLine
from tests.nightly.integration.following import Following

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUICK = (
    "warmup.steps=1",
    "run.steps=100000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "rollout.group_size=2",
)
GONE_S = 15.0
"""How soon the run does without a replica of which a rank was killed, on a machine with other things to do."""
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


def test_a_killed_rank_takes_its_replica_along_which_is_replaced(
    cosmos: CommandLine, arithmetic: Callable[..., list[str]]
) -> None:
    run = cosmos.folder / "runs" / "killed"
    process = cosmos.start("run", *arithmetic("killed", *QUICK, "rollout.mesh.tp=2"))
    with Following(run, process) as following:
        following.steps(3)
        following.until(lambda state: bool(state.replicas["rollout-0"].leases))
        before = following.incarnation("rollout-0")
        (rank,) = followers(cosmos)
        rank.kill()
        gone_s = following.until(lambda state: before in state.fenced)
        following.until(following.is_back("rollout-0", before))
        following.steps(3)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    print(f"{gone_s:.2f} s from the rank's end to that of its replica (fails: {GONE_S} s)")
    assert process.returncode == 130, output
    assert "rank 1 of the 2 ranks of the engine ended: signal SIGKILL" in output
    assert "(exit code 75); rollout-0 is started again" in output
    assert gone_s < GONE_S
    assert json.loads((run / "summary.json").read_text())["restarts"] == {"rollout-0": 1}
    # Each prompt was trained on once or dropped with a reason, those of the replica that was lost among them.
    cosmos("audit", "runs/killed")
    assert followers(cosmos) == []
