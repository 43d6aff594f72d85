"""The time until a run gets on after one of its processes was killed, beside another checkout of cosmos-core.

    python benchmarks/recovery.py [--kills 5] [--rounds 2] [--beside OTHER_CHECKOUT]

The demo, with steps of little work and two rollout replicas. The controller is killed: seconds until the next step that
is done under the next one. A rollout replica is killed: seconds until another process of its name is in the run, and
until that generates with attested weights. Rounds of the two checkouts take turns; each row has the median and the
slowest of all kills. Other work on the machine makes both larger.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import psutil

RECIPE: Final = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
OVERRIDES: Final = (
    "warmup.steps=1",
    "run.steps=1000000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "rollout.replicas=2",
    "rollout.group_size=2",
    "rollout.max_in_flight=16",
    "launch.restarts=1000",
)
REPLICA: Final = "rollout-0"
_BETWEEN_S: Final = 8.0
_LIMIT_S: Final = 120.0


def main() -> None:
    """Measure the checkouts in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each process, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        json.dump(measure(given.kills), sys.stdout)
        return
    checkouts = {"this one": Path(__file__).parents[1]} | ({"the other": given.beside} if given.beside else {})
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds):
        for name, checkout in checkouts.items():
            for what, values in json.loads(measured(checkout, given.kills)).items():
                found.setdefault((what, name), []).extend(values)
    print("| killed, and waited for | checkout | median s | slowest s | kills |\n|---|---|---|---|---|")
    for (what, name), values in sorted(found.items()):
        print(f"| {what} | {name} | {median(values):.2f} | {max(values):.2f} | {len(values)} |")


def measured(checkout: Path, kills: int) -> str:
    """The output of a measurement with the packages of a checkout, which are not installed."""
    plugins = (path.parent for path in checkout.glob("plugins/*/*/pyproject.toml"))
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, (checkout, *plugins))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", "--kills", str(kills)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout


def measure(kills: int) -> dict[str, list[float]]:
    """Run the demo, kill its processes in turns, and read from its journal when it got on."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "recovery"
        pairs = [argument for override in OVERRIDES for argument in ("--set", override)]
        command = [sys.executable, "-m", "cosmos_core.cli", "run", str(RECIPE), "--name", run.name, *pairs]
        process = subprocess.Popen(
            [*command, "--set", f"run.output_dir={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            killed = kill(run, process, kills)
            process.send_signal(signal.SIGINT)
            process.wait(_LIMIT_S)
        finally:
            process.kill()
        return times(run, killed)


def kill(run: Path, process: subprocess.Popen[bytes], kills: int) -> list[tuple[str, float]]:
    """Kill the controller and a rollout replica in turns; the names, and the unix times."""
    wait_for(lambda: pid_of(run, process, REPLICA))
    time.sleep(2 * _BETWEEN_S)
    killed = []
    for _ in range(kills):
        for name in ("controller", REPLICA):
            pid = wait_for(lambda name=name: pid_of(run, process, name))
            killed.append((name, time.time()))
            os.kill(pid, signal.SIGKILL)
            time.sleep(_BETWEEN_S)
    return killed


def pid_of(run: Path, process: subprocess.Popen[bytes], name: str) -> int:
    """The process that writes the output of a replica, or of the controller; 0 if there is none yet."""
    if name == "controller":
        path = run / "controller.json"
        return int(json.loads(path.read_text())["pid"]) if path.exists() else 0
    output = str(run / "logs" / f"{name}.log")
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(file.path == output for file in child.open_files()):
                found.append((child.create_time(), child.pid))
    # Its workers, which came later, write there, too.
    return min(found, default=(0.0, 0))[1]


def wait_for(find: Callable[[], int]) -> int:
    """What is found in time."""
    deadline = time.monotonic() + _LIMIT_S
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not get on")
        time.sleep(0.1)
    return found


def times(run: Path, killed: list[tuple[str, float]]) -> dict[str, list[float]]:
    """Seconds from each kill to what shows that the run has got on, by the run's journal."""
    from cosmos_core.control.journal import entries
    from cosmos_core.control.machine import core
    from cosmos_core.control.machine.events import ControllerStarted, ReplicaJoined, RunOpened

    state, told = None, []
    for _, when, event in entries(run / "journal.sqlite"):
        step = state.step if state is not None else 0
        state = core.begin(event) if isinstance(event, RunOpened) else core.step(state, event) or state
        there = state.replicas.get(REPLICA)
        told.append(
            (
                when,
                isinstance(event, ControllerStarted),
                state.step > step,
                isinstance(event, ReplicaJoined) and event.name == REPLICA,
                there is not None and there.version >= 0 and there.incarnation,
            )
        )
    found: dict[str, list[float]] = {}
    for name, at in killed:
        after = [entry for entry in told if entry[0] > at]
        if name == "controller":
            started = next(when for when, is_start, *_ in after if is_start)
            found.setdefault("controller, its start", []).append(started - at)
            stepped = next(when for when, _, is_step, *_ in after if is_step and when > started)
            found.setdefault("controller, a step", []).append(stepped - at)
        else:
            before = next((entry[4] for entry in reversed(told) if entry[0] <= at and entry[4]), "")
            joined = next(when for when, _, _, is_join, _ in after if is_join)
            served = next(when for when, *_, by in after if by and by != before)
            found.setdefault("rollout, its return", []).append(joined - at)
            found.setdefault("rollout, its weights", []).append(served - at)
    return found


if __name__ == "__main__":
    main()
