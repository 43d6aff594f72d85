"""What dies in a run is replaced, and the run goes on: nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import gzip
import json
import re
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest

from cosmos_core.devices import HOW_IT_FAILED
from tests.commandline import CommandLine
from tests.following import Following, step_times
from tests.runs import arithmetic

pytestmark = pytest.mark.timeout(400)

# Steps of the algorithm from the beginning, of little work, so that what is measured is not the work.
QUICK = (
    "algorithm.plugin='ailing'",
    "warmup.steps=1",
    "run.steps=100000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "policy.replicas=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=16",
    "rollout.replicas=2",
    "control.lost_after_s=4",
    "launch.restarts=20",
)
KILLED = ("rollout-0", "policy-1", "controller")
RESUMES_S = 5.0
"""How soon after a process was killed two more steps are done, on a machine that has nothing else to do."""
GAP_S = 1.0
"""Longest time without a step there, while a rollout replica is replaced."""
STEPS_AWAY = 5
"""Fewest steps in the second or more until it is back: training that waited for it would do the one in progress."""
TOLERANCE = 3.0
"""Times these bounds are what fails the test: the machine that tests run on has other things to do as well."""


@attrs.frozen
class Recovered:
    """A run of which one process after the other was killed or stopped, and which was then interrupted."""

    folder: Path
    code: int
    output: str
    took_s: dict[str, float]
    """Seconds from each kill to two more steps."""
    killed_at: dict[str, float]
    """Unix time of each kill; the one after a rollout replica's comes as soon as that one is back."""
    profiled: str
    """The words of profiles that were asked for before it was interrupted."""
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def recovered(cosmos: CommandLine, runs: Path) -> Recovered:
    run = runs / "killed"
    process = cosmos.start("run", *arithmetic("killed", *QUICK))
    with Following(run, process) as following:
        following.steps(5)
        took_s: dict[str, float] = {}
        killed_at: dict[str, float] = {}
        for name in KILLED:
            following.look()
            before = following.incarnation(name) if name != "controller" else ""
            killed_at[name] = time.time()
            following.signal(name, signal.SIGKILL)
            if name == "controller":
                took_s[name] = following.until(lambda state: state.term == 2)
            elif name == "policy-1":
                following.until(lambda state: "policy-1" not in state.replicas)
            took_s[name] = took_s.get(name, 0.0) + following.steps(2)
            if before:
                following.until(following.is_back(name, before))
        stopped = following.incarnation("rollout-1")
        following.signal("rollout-1", signal.SIGSTOP)
        following.until(following.is_back("rollout-1", stopped))
        before = {name: following.incarnation(name) for name in ("policy-0", "policy-1")}
        (run.parents[1] / "gpu-fails").touch()
        following.until(lambda state: any(following.is_back(name, was)(state) for name, was in before.items()))
        following.steps(5)
        profiled = cosmos("profile", str(run), "--steps", "2", "--ranks", "0,1")
        profiled += cosmos("profile", str(run), "--pool", "rollout", "--steps", "4", "--ranks", "1")
        refused = cosmos("profile", str(run), "--ranks", "7", code=1)
        assert "no rank 7 among the policy processes, which are 0 (policy-0), 1 (policy-1)" in refused
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    summary = json.loads((run / "summary.json").read_text())
    return Recovered(run, process.returncode, output, took_s, killed_at, profiled, summary)


def test_it_goes_on_until_it_is_interrupted(recovered: Recovered) -> None:
    assert recovered.code == 130, recovered.output
    assert recovered.summary["outcome"] == "stopped", recovered.summary["reason"]


@pytest.mark.parametrize("name", KILLED)
def test_what_was_killed_is_told_and_training_goes_on_within_seconds(recovered: Recovered, name: str) -> None:
    assert f"{name} ended: killed by signal 9; " in recovered.output
    print(f"{recovered.took_s[name]:.2f} s to two more steps (idle: {RESUMES_S} s)")
    assert recovered.took_s[name] < RESUMES_S * TOLERANCE, recovered.took_s


def test_what_was_killed_or_stopped_is_started_again(recovered: Recovered) -> None:
    assert {"controller", "policy-1", "rollout-0", "rollout-1"} <= recovered.summary["restarts"].keys()


def test_one_whose_gpu_fails_is_started_again(recovered: Recovered) -> None:
    told = re.search(r"policy-. ended: (.*) \(exit code 75\); policy-. is started again", recovered.output)
    assert told, recovered.output
    assert told[1].endswith(f"CUDA error: uncorrectable ECC error encountered; {HOW_IT_FAILED}")


def test_each_step_is_trained_once_and_each_prompt_in_one_at_most(cosmos: CommandLine, recovered: Recovered) -> None:
    assert len(step_times(recovered.folder)) == recovered.summary["steps"]
    assert json.loads(cosmos("audit", str(recovered.folder), "--json"))["problems"] == []


def test_training_does_not_wait_for_a_rollout_replica_that_another_stands_in_for(recovered: Recovered) -> None:
    killed, back = recovered.killed_at["rollout-0"], recovered.killed_at["policy-1"]
    steps = [when for when in step_times(recovered.folder) if killed < when < back]
    longest = max(b - a for a, b in pairwise([killed, *steps, back]))
    print(f"{len(steps)} steps in the {back - killed:.2f} s it was away; {longest:.2f} s without (idle: {GAP_S} s)")
    assert len(steps) >= STEPS_AWAY
    assert longest < GAP_S * TOLERANCE


def test_what_was_traced_has_the_ranges_of_a_step(recovered: Recovered) -> None:
    traces = [Path(line) for line in recovered.profiled.splitlines() if line.endswith(".json.gz")]
    replicas = ("policy-0", "policy-1", "rollout-1")
    assert [path.name for path in traces] == [f"{replica}-rank-0.json.gz" for replica in replicas]
    found = []
    for path in traces:
        with gzip.open(path) as file:
            found.append(Counter(event["name"] for event in json.load(file)["traceEvents"]))
    for name in ("pack", "forward_backward", "optimizer", "publish"):
        assert [policy[name] for policy in found[:2]] == [2, 2], name
    assert found[2]["generate"] == 4
