"""A controller of its own process with keys, for tests of who may connect."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import save_job
from cosmos_core.config.schema import (
    AlgorithmConfig,
    ControlConfig,
    DatasetConfig,
    ModelConfig,
    Recipe,
    RewardConfig,
    RunConfig,
)
from cosmos_core.run.address import read_address
from cosmos_core.transport import key_folder
from cosmos_core.transport.key_folder import USUAL, Wanted


def make_job(directory: Path) -> Job:
    """A run that waits for its policy; its keys: the usual ones, one for `rollout-0`, and an observer's, `wall`."""
    recipe = Recipe(
        run=RunConfig(name="keyed", steps=4),
        model=ModelConfig(path="nowhere"),
        algorithm=AlgorithmConfig(plugin="none"),
        dataset=DatasetConfig(plugin="none"),
        reward=(RewardConfig(plugin="none"),),
        control=ControlConfig(heartbeat_s=0.3, lost_after_s=20.0, join_timeout_s=3600.0),
    )
    job = Job(
        run_id="run-1",
        directory=directory,
        recipe_directory=directory,
        recipe=recipe,
        num_train_rows=50,
        num_heldout_rows=10,
        num_evaluation_prompts=0,
        uses_rollouts=True,
        stages=(StageFacts(source="rollouts", min_group_size=2),),
    )
    directory.mkdir()
    save_job(job)
    key_folder.make(job.keys, (*USUAL, Wanted(role="rollout", name="rollout-0"), Wanted(role="observer", name="wall")))
    return job


@contextlib.contextmanager
def controller(job: Job) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The controller's process, once it listens, and its address."""
    command = [sys.executable, "-m", "cosmos_core.control", "--run", str(job.directory)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 30
        while (address := read_address(job)) is None:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield process, address
    finally:
        process.kill()
        process.communicate()
