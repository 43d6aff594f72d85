"""A replica of several processes loses one: all end promptly, and the controller learns why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cosmos_core.config.job import Job
from cosmos_core.config.mesh import world_size
from cosmos_core.control.journal import entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIZE = 2
ENDLESS = (f"policy.mesh.dp_shard={SIZE}", "run.steps=1000000", "policy.checkpoint.interval=1000000")
WITHIN_S = 10.0  # under a second, if there is a core for each

LAYOUTS = {
    "fsdp": ("policy.mesh.dp_shard=2",),
    "tp": ("policy.mesh.tp=2",),
    "pp": ("policy.mesh.pp=2",),
    "pp-fsdp": ("policy.mesh.pp=2", "policy.mesh.dp_shard=2"),
}

FAULTY = """
import os, signal
from cosmos_core.policy import __main__ as role
from cosmos_core.policy.checkpoints import saver
from cosmos_core.models import building
from cosmos_core.models.huggingface import HuggingFaceModel
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.replica.process import run_role

def fail():
    {what}

def failing(owner, name, when=lambda *arguments: True):
    inner = getattr(owner, name)
    def call(*arguments, **keywords):
        if when(*arguments):
            fail()
        return inner(*arguments, **keywords)
    setattr(owner, name, call)

trainers = []
def in_the_fourth_step(*arguments):
    return any(trainer.step == 3 for trainer in trainers)

made = Trainer.__init__
def noted(self, *arguments, **keywords):
    made(self, *arguments, **keywords)
    trainers.append(self)
Trainer.__init__ = noted

{where}
run_role("policy", role.main)
"""
"""A process of a replica that fails somewhere."""

RAISES = "raise RuntimeError('this rank is broken')"
WAYS = {"raises": RAISES, "exits": "os._exit(0)", "killed": "os.kill(os.getpid(), signal.SIGKILL)"}
PLACES = {
    "load": "failing(building, 'fill')",
    "forward": "failing(HuggingFaceModel, 'hidden', in_the_fourth_step)",
    "step": "failing(Trainer, 'train', in_the_fourth_step)",
    "copy": "failing(saver, 'copy_state')",
    "save": "failing(saver, '_write_tensors')",
}


def wait_until(condition: Callable[[], bool], processes: Sequence[Any]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reasons(job: Job) -> str:
    return " ".join(str(event) for _, _, event in entries(job.journal) if "reason" in str(event))


def trains(job: Job) -> Callable[[], bool]:
    log = job.logs / "policy-0.jsonl"
    return lambda: log.exists() and "generation 1" in log.read_text()


def all_gone(members: Sequence[Any]) -> list[int]:
    deadline = time.monotonic() + WITHIN_S
    start = time.monotonic()
    codes = [process.wait(max(0.01, deadline - time.monotonic())) for process in members]
    print(f"gone after {time.monotonic() - start:.2f} s")
    return codes


def test_a_killed_leader(imitation: Callable[..., Job], processes: Any, tmp_path: Any) -> None:
    job = imitation(tmp_path / "run", *ENDLESS)
    processes.controller(job)
    members = processes.policy(job, 0)
    wait_until(trains(job), members)
    time.sleep(1.0)  # somewhere in the middle of some step
    os.kill(members[0].pid, signal.SIGKILL)
    assert all_gone(members) == [-9, 75]
    assert "policy-0 rank 0: its process, the leader, is gone" in (job.logs / "policy-0.1.jsonl").read_text()


FAULTS = (
    ("fsdp", "step", "raises"),
    ("tp", "forward", "raises"),
    ("pp", "forward", "raises"),
    ("pp", "copy", "raises"),
    ("pp-fsdp", "load", "raises"),
    ("pp-fsdp", "forward", "killed"),
    ("tp", "save", "exits"),
)


@pytest.mark.parametrize("fault", FAULTS, ids="-".join)
def test_a_rank_that_fails(imitation: Callable[..., Job], processes: Any, tmp_path: Any, fault: Sequence[str]) -> None:
    layout, place, way = fault
    job = imitation(tmp_path / "run", *LAYOUTS[layout], "run.steps=1000000", "policy.checkpoint.interval=2")
    last = world_size(job.recipe.policy.mesh) - 1
    controller = processes.controller(job)
    members = processes.policy(job, 0, code={last: FAULTY.format(what=WAYS[way], where=PLACES[place])})
    wait_until(lambda: members[-1].poll() is not None, [])
    # An error is the run's; a process that is gone without a word can be replaced, and the run is told nothing of it.
    is_error = way == "raises"
    assert all_gone(members)[:-1] == [1 if is_error else 75] * last
    words = "this rank is broken" if is_error else "ended without a word"
    said = (job.logs / "policy-0.jsonl").read_text()
    assert f"policy-0 rank {last}: " in said
    assert words in said
    if is_error and place != "load":
        # Without weights the replica has not joined: whoever started it sees it end.
        controller.wait(30)
        assert f"policy-0 rank {last}: " in reasons(job)
        assert words in reasons(job)
