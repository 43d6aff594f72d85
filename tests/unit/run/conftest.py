"""A whole run's journal, made by fake replicas that follow directives."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import recipe_from
from cosmos_core.control.machine import core
from cosmos_core.control.machine.directives import directive_for
from cosmos_core.control.machine.events import (
    Commanded,
    ControllerStarted,
    ReplicaJoined,
    ReplicaLost,
    Reported,
    Resumed,
    RunEnded,
    RunOpened,
)
from cosmos_core.control.machine.settings import settings_of
from cosmos_core.policy.checkpoints.checkpoint import COMPLETE, Place, marker, path_of
from cosmos_core.transport.messages import REQUEST, Stop
from cosmos_core.transport.reports import REPORT
from tests.simulation.replicas import FakePolicy, FakeRollout, World

RECIPE = {
    "run": {"name": "demo", "steps": 6},
    "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
    "algorithm": {"plugin": "grpo"},
    "dataset": {"plugin": "numbers"},
    "reward": [{"plugin": "right"}],
    "warmup": {"optimizer": {"lr": 1e-6}, "plugin": "sft", "steps": 3, "prompts_per_step": 2},
    "policy": {"optimizer": {"lr": 1e-6}, "prompts_per_step": 2, "checkpoint": {"interval": 4}},
    "rollout": {"group_size": 4, "max_in_flight": 8},
    "evaluation": {"interval": 3, "prompts": 5},
}


@pytest.fixture
def job(tmp_path):
    return Job(
        run_id="demo-1",
        directory=tmp_path / "demo",
        recipe_directory=tmp_path,
        recipe=recipe_from(RECIPE),
        num_train_rows=20,
        num_heldout_rows=5,
        num_evaluation_prompts=5,
        uses_rollouts=True,
        stages=(StageFacts(source="demonstrations"), StageFacts(source="rollouts", min_group_size=2)),
    )


class History:
    """Journal entries; a second passes with each."""

    def __init__(self, job):
        self.settings = settings_of(job)
        self.entries = []
        self.state = None
        self.world = World(group_size=4)
        self.fakes = {}
        self.append(RunOpened(settings=self.settings))
        self.start()

    def append(self, event):
        if isinstance(event, RunOpened):
            self.state = core.begin(event)
        else:
            core.step(self.state, event)
        number = len(self.entries) + 1
        self.entries.append((number, 1000.0 + number, event))

    def start(self):
        self.append(ControllerStarted(term=self.state.term + 1))

    def join(self, step=0, roles=("policy", "rollout")):
        for role in roles:
            name = f"{role}-0"
            incarnation = f"{name}#{len(self.entries)}"
            fake = (
                FakePolicy(self.world, name, incarnation, step)
                if role == "policy"
                else FakeRollout(self.world, incarnation, drop_every=3)
            )
            self.fakes[name] = fake
            self.append(
                ReplicaJoined(
                    name=name,
                    role=role,
                    incarnation=incarnation,
                    host="host",
                    pid=1,
                    step=step if role == "policy" else 0,
                    endpoints=fake.endpoints,
                )
            )

    def lose(self, name, reason):
        self.append(ReplicaLost(name=name, incarnation=self.state.replicas[name].incarnation, reason=reason))

    def work(self, until=10_000):
        """Let the replicas work until nothing is left to do, or the step is reached."""
        is_busy = True
        while is_busy and self.state.step < until:
            is_busy = self.turn()

    def turn(self):
        """Let each replica do what it is told to; whether any of them had something to report."""
        is_busy = False
        for name, fake in self.fakes.items():
            for report in fake.follow(directive_for(self.state, name)):
                is_busy = True
                replica = self.state.replicas[name]
                self.append(
                    Reported(
                        name=name,
                        incarnation=replica.incarnation,
                        sequence=replica.received + 1,
                        report=REPORT.encode(report),
                    )
                )
        return is_busy

    def stop(self):
        self.append(Commanded(ident="stop", request=REQUEST.encode(Stop())))

    def end(self):
        self.append(RunEnded(outcome=self.state.outcome, reason=self.state.reason))

    def resume(self, step):
        for fake in self.fakes.values():
            fake.end()
        self.append(Resumed(step=step, settings=self.settings))
        self.start()


@pytest.fixture
def put_checkpoint():
    """Leaves what tells that a job's checkpoint of a step is complete, and which generation made it."""

    def put(job, step, generation):
        folder = Path(path_of(job.checkpoints, step))
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(run_id=job.run_id, step=step, stage=0, nonfinite_steps=0, generation=generation)
        (folder / COMPLETE).write_bytes(marker(place))

    return put


@pytest.fixture
def history(job):
    return History(job)


@pytest.fixture
def open_history():
    """Makes the history of another job."""
    return History


@pytest.fixture
def finished(history):
    history.join()
    history.work()
    history.end()
    assert history.state.outcome == "finished"
    return history
