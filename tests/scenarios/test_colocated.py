"""Policy and engine on one device, in turns: memory is given up, and what dies asleep or awake is replaced."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Self

import attrs
import psutil
import pytest

from cosmos_core.config.loading import load_job
from cosmos_core.control.machine.state import State
from cosmos_core.replica.turns import is_locked
from cosmos_core.weights.shared_memory import directories_for_files
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
    holders: list[set[str]]
    """Roles that held their lock, each time that somebody looked."""


def policy_works(state: State) -> bool:
    return state.turn % 2 == 0 and not state.sleepless and state.running is not None


def rollouts_work(state: State) -> bool:
    return state.turn % 2 == 1 and not state.sleepless and bool(state.ledger.in_flight)


class Locks:
    """Looks at the locks of a run's processes all the time, on a thread of its own; a context manager."""

    def __init__(self, run_id: str) -> None:
        self.folder = directories_for_files()[0] / f"cosmos-scratch-turns-{run_id}"
        self.holders: list[set[str]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            # Two that wake at once may both hold their own for a moment, until they see one another.
            first = self._held()
            time.sleep(0.01)
            self.holders.append(first & self._held())

    def _held(self) -> set[str]:
        return {path.parent.name for path in self.folder.glob("*/*") if is_locked(path)}


@pytest.fixture(scope="module")
def turned(cosmos: CommandLine, runs: Path) -> Turned:
    run = runs / "colocated"
    process = cosmos.start("run", *arithmetic("colocated", *QUICK))
    names = ("policy-0", "rollout-0")
    with Following(run, process) as following, contextlib.ExitStack() as stack:
        following.steps(3)
        locks = stack.enter_context(Locks(load_job(run).run_id))
        end, resident = following.state.step + 3, {name: [] for name in names}
        processes = {name: psutil.Process(following.pid(name)) for name in names}
        while following.state.step < end:
            following.look()
            for name in names:
                resident[name].append(processes[name].memory_info().rss)
            time.sleep(0.005)
        for name, works in (("rollout-0", policy_works), ("policy-0", policy_works), ("rollout-0", rollouts_work)):
            following.until(works)
            before = following.incarnation(name)
            following.signal(name, signal.SIGKILL)
            following.until(following.is_back(name, before))
            following.steps(2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert not locks.folder.exists()
    summary = json.loads((run / "summary.json").read_text())
    return Turned(run, summary["outcome"], resident, locks.holders)


def test_who_sleeps_gives_its_memory_up(turned: Turned) -> None:
    fell = {name: max(sizes) - min(sizes) for name, sizes in turned.resident.items()}
    print(fell)
    assert fell["rollout-0"] > 0.7 * WEIGHTS, fell
    assert fell["policy-0"] > 2.5 * WEIGHTS, fell


def test_one_pool_is_awake_at_a_time(turned: Turned) -> None:
    seen = Counter(frozenset(roles) for roles in turned.holders)
    print({" and ".join(sorted(roles)): count for roles, count in seen.items()})
    assert seen[frozenset({"policy"})] > 20
    assert seen[frozenset({"rollout"})] > 20
    assert not seen[frozenset({"policy", "rollout"})], seen


def test_it_goes_on_when_a_sleeper_and_when_one_at_work_is_killed(cosmos: CommandLine, turned: Turned) -> None:
    assert turned.outcome == "stopped"
    assert len(step_times(turned.folder)) >= 8
    assert json.loads(cosmos("audit", str(turned.folder), "--json"))["problems"] == []
    log = (turned.folder / "logs" / "policy-0.jsonl").read_text()
    assert '"ERROR"' not in log, log
