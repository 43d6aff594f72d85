"""Policy and engine on one device, in turns: memory is given up, and what dies asleep or awake is replaced."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import attrs
import psutil
import pytest

from cosmos_core.control.machine.state import State
from tests.commandline import CommandLine
from tests.following import Following, step_times
from tests.runs import arithmetic

pytestmark = pytest.mark.timeout(400)

MIB = 1 << 20
WEIGHTS = 50 * MIB
"""Float32 parameters of a model this wide, about; the policy has the optimizer's moments and gradients besides."""
QUICK = (
    "rollout.placement='colocated'",
    "warmup.steps=1",
    "run.steps=100000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "policy.checkpoint.interval=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=16",
    "control.lost_after_s=4",
    "launch.restarts=20",
    "model.config.hidden_size=512",
    "model.config.intermediate_size=4096",
)


@attrs.frozen
class Turned:
    """A run in turns whose processes were killed while they slept and while they worked, and which was interrupted."""

    folder: Path
    outcome: str
    resident: dict[str, list[int]]
    """Memory of each replica while two steps were done, in bytes."""
    asleep: dict[str, dict[str, float]]


def policy_works(state: State) -> bool:
    return state.turn % 2 == 0 and not state.sleepless and state.running is not None


@pytest.fixture(scope="module")
def turned(cosmos: CommandLine, runs: Path) -> Turned:
    run = runs / "colocated"
    process = cosmos.start("run", *arithmetic("colocated", *QUICK))
    names = ("policy-0", "rollout-0")
    with Following(run, process) as following:
        following.steps(3)
        end, resident = following.state.step + 3, {name: [] for name in names}
        processes = {name: psutil.Process(following.pid(name)) for name in names}
        while following.state.step < end:
            following.look()
            for name in names:
                resident[name].append(processes[name].memory_info().rss)
            time.sleep(0.005)
        asleep = json.loads(cosmos("status", str(run), "--json"))["statuses"]
        for name in names[::-1]:
            following.until(policy_works)
            before = following.incarnation(name)
            following.signal(name, signal.SIGKILL)
            following.until(following.is_back(name, before))
            following.steps(2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    summary = json.loads((run / "summary.json").read_text())
    return Turned(run, summary["outcome"], resident, asleep)


def test_who_sleeps_gives_its_memory_up(turned: Turned) -> None:
    fell = {name: max(sizes) - min(sizes) for name, sizes in turned.resident.items()}
    print(fell)
    assert fell["rollout-0"] > 0.7 * WEIGHTS, fell
    assert fell["policy-0"] > 2.5 * WEIGHTS, fell


def test_one_pool_is_asleep_at_a_time(turned: Turned) -> None:
    assert sum("asleep" in statuses for statuses in turned.asleep.values()) in (1, 2), turned.asleep


def test_it_goes_on_when_a_sleeper_and_when_a_trainer_is_killed(cosmos: CommandLine, turned: Turned) -> None:
    assert turned.outcome == "stopped"
    assert len(step_times(turned.folder)) >= 8
    assert json.loads(cosmos("audit", str(turned.folder), "--json"))["problems"] == []
    log = (turned.folder / "logs" / "policy-0.jsonl").read_text()
    assert '"ERROR"' not in log, log
