"""The demo, while its processes are killed, paused and hung at random: it learns what it learns undisturbed.

What is done is the same in every run of the tests; with `-m sweep` a run is added in which it is drawn anew.
`COSMOS_CHAOS_SEED=N` repeats what was done in a run that failed, as far as the machine's timing lets it;
`COSMOS_CHAOS_HARMS=N` does more, or less.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from cosmos_core.control.journal import entries
from cosmos_service_tools.auditor import audit
from tests.commandline import CommandLine
from tests.following import Following, describe
from tests.nightly.integration.chaos.harm import Harmer, harms, is_enough

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RECIPE = Path(__file__).parents[4] / "recipes" / "arithmetic.toml"
NUM_HARMS = int(os.environ.get("COSMOS_CHAOS_HARMS", "20"))
SEED = 2
ACCURACY = 0.95
"""What the demo comes to, whatever its seed."""
OVERRIDES = (
    "policy.replicas=2",
    "rollout.replicas=2",
    "policy.checkpoint.interval=20",
    "control.lost_after_s=4",
    "control.join_timeout_s=900",
    "launch.restarts=1000",
)


@pytest.mark.parametrize("drawn", [SEED, pytest.param(None, marks=pytest.mark.sweep, id="drawn")])
def test_the_demo_learns_although_its_processes_die(cosmos: CommandLine, drawn: int | None) -> None:
    seed = int(os.environ.get("COSMOS_CHAOS_SEED") or drawn or time.time())
    print(f"COSMOS_CHAOS_SEED={seed}")
    run = cosmos.folder / "runs" / "chaos"
    pairs = [argument for override in OVERRIDES for argument in ("--set", override)]
    process = cosmos.start("run", str(RECIPE), "--name", "chaos", *pairs)
    with Following(run, process) as following:
        following.until(lambda state: state.has_started)
        harmer = Harmer(following, harms(seed))
        processes: set[psutil.Process] = set()
        try:
            while not is_enough(harmer.harms, NUM_HARMS):
                following.look()
                assert process.poll() is None, process.communicate()[0]
                assert not (following.state and following.state.outcome), describe(following.state)
                if harmer.turn():
                    processes.update(psutil.Process(process.pid).children(recursive=True))
        finally:
            harmer.let_go()
            print(*(f"{when:.1f} {name}: {harm}" for when, name, harm in harmer.done), sep="\n")
    output = process.communicate(timeout=1200)[0]
    print(output[-3000:])
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], process.returncode) == ("finished", 0), summary["reason"]
    assert is_enough(harmer.harms, NUM_HARMS)
    assert summary["heldout_accuracy_after"] >= ACCURACY
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for each in processes for name in shared if f"-{each.pid}-" in name]
    found = audit(entries(run / "journal.sqlite"))
    assert not found.problems, found.problems
    assert found.lost + found.terms > sum(harm.kind == "kill" for _, _, harm in harmer.done)
    assert [batch.step for batch in found.batches] == list(range(1, summary["steps"] + 1))
