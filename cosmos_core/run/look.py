"""Looking at a run from outside: through its controller while it runs, else from its journal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cosmos_core.config.loading import load_job
from cosmos_core.config.stages import stages
from cosmos_core.controller.journal import entries
from cosmos_core.controller.machine.progress import best_checkpoint
from cosmos_core.observe.live import line
from cosmos_core.run import folder
from cosmos_core.run.follow import Follower
from cosmos_core.run.observer import Observer
from cosmos_core.run.roster import read_address
from cosmos_core.run.view import progress_of

_ANSWER_S: Final = 5.0
_POLL_S: Final = 0.1


def look(directory: Path) -> Iterator[str]:
    """Lines about a run, for people.

    Raises:
        CosmosError: It is no run, or its journal cannot be read.
    """
    job = load_job(directory)
    follower = Follower()
    address = read_address(job)
    if address is not None:
        _watch(follower, address, job.run_id)
    elif job.journal.exists():
        follower.fold(entries(job.journal))
    state = follower.state
    if state is None:
        yield f"{job.recipe.run.name}: not begun yet"
        return
    now = time.time()
    elapsed_s = sum(last - first for first, last in follower.sessions)
    if address is not None and follower.sessions:
        elapsed_s += now - follower.sessions[-1][1]
    yield f"{job.recipe.run.name}: {_verdict(state.outcome, is_running=address is not None)}"
    yield line(progress_of(follower, stages(job.recipe), now=now, elapsed_s=elapsed_s))
    for replica in (*state.named("policy"), *state.named("rollout")):
        held = replica.step if replica.role == "policy" else replica.version
        yield f"  {replica.name}: weights of step {max(0, held)}, pid {replica.pid}"
    best = best_checkpoint(state)
    for step in sorted(state.checkpoints.saved):
        yield f"  checkpoint of step {step}{' (best)' if step == best else ''}: {state.checkpoints.saved[step]}"
    if state.reason:
        yield state.reason
    if (job.directory / folder.REPORT).exists():
        yield f"  report: {job.directory / folder.REPORT}"


def _verdict(outcome: str, *, is_running: bool) -> str:
    if is_running:
        return f"running, {outcome} in a moment" if outcome else "running"
    return outcome or "interrupted: its controller is gone; cosmos run --resume goes on"


def _watch(follower: Follower, address: str, run_id: str) -> None:
    """Fold all that there is now: between two times that the controller sends gauges it sends the journal so far."""
    observer = Observer(address, run_id)
    deadline = time.monotonic() + _ANSWER_S
    try:
        while observer.num_gauges < 2 and time.monotonic() < deadline:
            if found := observer.poll(_POLL_S):
                follower.fold(found)
                deadline = time.monotonic() + _ANSWER_S
    finally:
        observer.close()
