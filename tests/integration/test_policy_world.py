"""A replica of several processes loses one: all end promptly, and the controller learns why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cosmos_core.config.job import Job
from cosmos_core.controller.journal import entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SIZE = 2
ENDLESS = (f"policy.mesh.dp_shard={SIZE}", "run.steps=1000000", "policy.checkpoint.interval=1000000")
WITHIN_S = 10.0  # under a second, if there is a core for each

BROKEN = """
from cosmos_core.errors import TrainingError
from cosmos_core.policy.__main__ import main
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.replica.process import run_role
train = Trainer.train

def broken(self, *arguments):
    if self.step == 3:
        raise TrainingError("this rank is broken")
    return train(self, *arguments)

Trainer.train = broken
run_role("policy", main)
"""


def wait_until(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]]) -> None:
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


def all_gone(members: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    deadline = time.monotonic() + WITHIN_S
    start = time.monotonic()
    codes = [process.wait(max(0.01, deadline - time.monotonic())) for process in members]
    print(f"gone after {time.monotonic() - start:.2f} s")
    return codes


def test_a_killed_follower(imitation: Callable[..., Job], processes: Any, tmp_path: Any) -> None:
    job = imitation(tmp_path / "run", *ENDLESS)
    controller = processes.controller(job)
    members = processes.policy(job, 0)
    wait_until(trains(job), members)
    time.sleep(1.0)  # somewhere in the middle of some step
    os.kill(members[1].pid, signal.SIGKILL)
    assert all_gone(members) == [1, -9]
    controller.wait(30)
    cause = f"policy-0 rank 1: its process (pid {members[1].pid}) ended without a word"
    assert cause in reasons(job)
    assert cause in (job.logs / "policy-0.jsonl").read_text()


def test_a_killed_leader(imitation: Callable[..., Job], processes: Any, tmp_path: Any) -> None:
    job = imitation(tmp_path / "run", *ENDLESS)
    processes.controller(job)
    members = processes.policy(job, 0)
    wait_until(trains(job), members)
    time.sleep(1.0)  # somewhere in the middle of some step
    os.kill(members[0].pid, signal.SIGKILL)
    assert all_gone(members) == [-9, 1]
    assert "policy-0 rank 0: its process, the leader, is gone" in (job.logs / "policy-0.1.jsonl").read_text()


def test_an_error_on_one_rank(imitation: Callable[..., Job], processes: Any, tmp_path: Any) -> None:
    job = imitation(tmp_path / "run", *ENDLESS)
    controller = processes.controller(job)
    members = processes.policy(job, 0, code={1: BROKEN})
    wait_until(lambda: members[1].poll() is not None, [])
    assert all_gone(members) == [1, 1]
    controller.wait(30)
    assert "policy-0 rank 1: this rank is broken" in reasons(job)
    assert "this rank is broken" in (job.logs / "policy-0.1.jsonl").read_text()
    assert "policy-0 rank 1: this rank is broken" in (job.logs / "policy-0.jsonl").read_text()
