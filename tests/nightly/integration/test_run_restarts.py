"""What dies is replaced, and the run goes on: nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Reported
from cosmos_core.transport.reports import REPORT, GroupFinished
from tests.commandline import CommandLine
from tests.following import Following, history, step_times

Arguments = Callable[..., list[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Steps of the algorithm from the beginning, of little work, so that what is measured is not the work.
QUICK = (
    "warmup.steps=1",
    "run.steps=100000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=16",
)


def check_steps(run: Path) -> None:
    """Each step was trained once, one after the other, and each prompt went into one of them at most."""
    outcome = json.loads((run / "summary.json").read_text())
    assert outcome["outcome"] == "stopped", outcome["reason"]
    assert len(step_times(run)) == outcome["steps"]


def finished_by(run: Path, name: str) -> set[int]:
    """Leases that a replica finished."""
    said = [event.report for _, event in history(run) if isinstance(event, Reported) and event.name == name]
    return {report.lease for report in map(REPORT.decode, said) if isinstance(report, GroupFinished)}


def in_flight_when_asked_to_leave(run: Path, name: str) -> set[int]:
    """Leases that a replica had when it was told to get nothing new."""
    events = iter(event for _, event in history(run))
    state = core.begin(next(events))
    for event in events:
        core.step(state, event)
        if name in state.draining:
            return set(state.replicas[name].leases)
    return set()


def test_a_replica_joins_and_leaves_again(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "elastic"
    process = cosmos.start("run", *arithmetic("elastic", *QUICK))
    with Following(run, process) as following:
        following.steps(2)
        address = str(following.controller["address"])
        refused = cosmos("replica", "rollout", "--controller", address, "--name", "rollout-0", code=1)
        assert "the run has a replica of this name" in refused
        joiners = {
            "policy": cosmos.start("replica", "policy", "--controller", address),
            "rollout": cosmos.start("replica", "rollout", "--run", "runs/elastic", "--name", "rollout-more"),
        }
        following.until(lambda state: len(state.replicas) == 4)
        (policy,) = {name for name in following.state.replicas if name.startswith("policy-")} - {"policy-0"}
        following.until(lambda state: policy in state.generation.order.members if state.generation else False)
        following.until(lambda state: bool(state.replicas["rollout-more"].held))
        joiners["policy"].send_signal(signal.SIGINT)
        following.until(lambda state: policy in state.departed)
        # What `cosmos replica` started, it starts again.
        killed = following.incarnation("rollout-more")
        following.signal("rollout-more", signal.SIGKILL)
        following.until(following.is_back("rollout-more", killed))
        # Stopped for a moment, so that something is in flight when it is asked to leave.
        following.until(lambda state: bool(state.replicas["rollout-0"].leases))
        drained = following.pid("rollout-0")
        os.kill(drained, signal.SIGSTOP)
        cosmos("drain", "rollout-0", "--run", "runs/elastic")
        os.kill(drained, signal.SIGCONT)
        following.until(lambda state: "rollout-0" in state.departed)
        following.steps(2)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        said = {role: joiner.communicate(timeout=30)[0] for role, joiner in joiners.items()}
    assert process.returncode == 130, output
    assert [joiner.returncode for joiner in joiners.values()] == [0, 0], said
    assert f"{policy}: has left the run" in said["policy"]
    assert "rollout-more ended: killed by signal 9; rollout-more is started again" in said["rollout"]
    assert "rollout-more: the run is over (stopped)" in said["rollout"]
    begun = in_flight_when_asked_to_leave(run, "rollout-0")
    assert begun, "nothing was in flight when it was asked to leave"
    assert begun <= finished_by(run, "rollout-0")
    assert finished_by(run, "rollout-more")
    news = (
        f"{policy} has joined",
        f"{policy} is leaving, as",
        f"{policy} has left",
    )
    for words in (*news, "rollout-0 is leaving, as", "rollout-0 has left"):
        assert output.count(words) == 1, (words, output)
    assert output.count("rollout-more has joined") == 2
    # Who sees it first says it: whoever started it, or the controller.
    assert len(re.findall("rollout-more was lost: (?:killed by|its connection is closed)", output)) == 1, output
    check_steps(run)
    cosmos("audit", "runs/elastic")


def test_no_controller_no_replica(cosmos: CommandLine, arithmetic: Arguments) -> None:
    assert "no run in runs/ has that address" in cosmos(
        "replica", "rollout", "--controller", "tcp://127.0.0.1:1", code=2
    )
    assert "give --controller ADDR" in cosmos("replica", "rollout", code=2)
    cosmos("run", *arithmetic("over", "warmup.steps=1", "run.steps=1", "evaluation.prompts=0"))
    said = cosmos("replica", "policy", "--run", "runs/over", code=1)
    assert "no controller of this run answers at tcp://127.0.0.1:" in said
    manifest = cosmos.folder / "runs" / "over" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"cosmos_core": "', '"cosmos_core": "9.'))
    said = cosmos("replica", "policy", "--run", "runs/over", code=2)
    assert "this machine has other code than the run: cosmos-core was 9." in said
