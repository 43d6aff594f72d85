"""Replicas that are killed, drained and started while a run goes on: real processes, and no supervisor beside them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from cosmos_core.control.journal import entries, replay
from cosmos_core.control.machine.events import ReplicaLost, Reported
from cosmos_core.errors import ReplicaError
from cosmos_core.run.follower import Follower
from cosmos_core.run.observer import Observer
from cosmos_core.run.requests import address_of, ask
from cosmos_core.transport import key_folder
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.messages import Drain
from cosmos_core.transport.reports import REPORT, GenerationFormed, StepDone

STEPS = 300
SHORT = (f"run.steps={STEPS}", "policy.checkpoint.interval=0", "control.lost_after_s=60")


class Watcher:
    """A run that goes on, seen from outside."""

    def __init__(self, job) -> None:
        self.observer = Observer(address_of(job.directory, job), job.run_id, person_key(job.keys))
        self.follower = Follower()

    @property
    def state(self):
        return self.follower.state

    def until(self, happened, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.state is None or not happened(self.state):
            assert time.monotonic() < deadline, self.state
            assert self.state is None or not self.state.outcome, self.state.reason
            self.follower.fold(self.observer.poll(0.05))


@pytest.fixture
def watched():
    """Watches runs; closed in the end."""
    found: list[Watcher] = []

    def watch(job) -> Watcher:
        found.append(Watcher(job))
        return found[-1]

    yield watch
    for each in found:
        each.observer.close()


def reports(job, kind):
    """(unix time, replica, report) of a kind, in order; the run has ended."""
    for _, when, event in entries(job.journal):
        if isinstance(event, Reported) and isinstance(report := REPORT.decode(event.report), kind):
            yield when, event.name, report


def losses(job) -> list[float]:
    return [record.metrics["loss"] for record in replay(job.journal).steps]


def pair(processes, imitation, folder, *overrides):
    """A run of two policy replicas."""
    job = imitation(folder, "policy.replicas=2", *SHORT, *overrides)
    key_folder.ensure(job.keys)
    controller = processes.controller(job)
    return job, controller, [processes.policy(job, index)[0] for index in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_policy_replica_is_done_without_within_seconds(processes, imitation, watched, tmp_path):
    job, controller, (first, second) = pair(processes, imitation, tmp_path / "run")
    watched(job).until(lambda state: state.step >= 10)
    # The one that is killed hosts the rendezvous, and is the first of the group.
    first.kill()
    killed_at = time.time()
    assert second.wait(120) == controller.wait(120) == 0
    state = replay(job.journal)
    assert (state.outcome, state.step, len(state.steps)) == ("finished", STEPS, STEPS)
    (lost,) = [event for _, _, event in entries(job.journal) if isinstance(event, ReplicaLost)]
    assert lost.reason.startswith("its connection is closed")
    after = [when for when, name, _ in reports(job, StepDone) if name == "policy-1" and when > killed_at + 0.3]
    assert after[0] - killed_at < 5.0
    assert [record.step for record in state.steps] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_leave_and_join_and_the_run_trains_the_same(processes, imitation, watched, tmp_path):
    whole = imitation(tmp_path / "whole", *SHORT)
    key_folder.ensure(whole.keys)
    alone = [processes.controller(whole), *processes.policy(whole, 0)]
    assert [process.wait(120) for process in alone] == [0, 0]

    job, controller, (first, second) = pair(processes, imitation, tmp_path / "run")
    run = watched(job)
    run.until(lambda state: state.step >= 10)
    ask(job.directory, Drain(name="policy-0"))
    run.until(lambda state: "policy-0" in state.departed)
    # Only to give the one that joins the time that its start takes.
    os.kill(second.pid, signal.SIGSTOP)
    assert first.wait(20) == 0
    with pytest.raises(ReplicaError, match="policy-1 is the last policy replica that stays"):
        ask(job.directory, Drain(name="policy-1"))
    with pytest.raises(ReplicaError, match="policy-7 is not in this run, which has policy-1"):
        ask(job.directory, Drain(name="policy-7"))
    (joiner,) = processes.policy(job, 0)
    run.until(lambda state: "policy-0" in state.replicas)
    os.kill(second.pid, signal.SIGCONT)
    assert joiner.wait(120) == second.wait(120) == controller.wait(120) == 0

    state = replay(job.journal)
    assert (state.outcome, state.step) == ("finished", STEPS)
    assert not any(isinstance(event, ReplicaLost) for _, _, event in entries(job.journal))
    formed = [(name, report.step) for _, name, report in reports(job, GenerationFormed)]
    assert len(formed) == 5
    assert len({step for _, step in formed[-2:]}) == 1
    assert formed[-1][1] > 0
    assert all(record.num_samples == 8 for record in state.steps)
    assert losses(job) == pytest.approx(losses(whole), rel=0.02, abs=2e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_when_all_are_gone_one_goes_on_from_the_checkpoint(processes, imitation, watched, tmp_path):
    job = imitation(tmp_path / "run", *SHORT, "policy.checkpoint.interval=20")
    key_folder.ensure(job.keys)
    controller = processes.controller(job)
    (only,) = processes.policy(job, 0)
    run = watched(job)
    run.until(lambda state: state.checkpoints.saved and state.step not in state.checkpoints.saved)
    only.kill()
    run.until(lambda state: not state.replicas)
    (another,) = processes.policy(job, 0)
    assert another.wait(120) == controller.wait(120) == 0
    state = replay(job.journal)
    assert (state.outcome, state.step) == ("finished", STEPS)
    assert [record.step for record in state.steps] == list(range(1, STEPS + 1))
    assert state.ledger.consumed == 8 * STEPS
    if not state.rollbacks:
        return  # it was killed just as its step was saved: nothing had to be undone
    twice: dict[int, list[float]] = {}
    for _, _, report in reports(job, StepDone):
        twice.setdefault(report.step, []).append(report.metrics["loss"])
    undone = {step: both for step, both in twice.items() if len(both) > 1}
    assert min(undone) == state.rollbacks[0] + 1
    assert all(first == again for first, again in undone.values())
