"""The controller's process with real sockets; replicas are threads that keep the contract without any weights."""

from __future__ import annotations

import json
import os
import signal
import socket as network
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
import zmq

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import save_job
from cosmos_core.config.schema import (
    AlgorithmConfig,
    ControlConfig,
    DatasetConfig,
    EvaluationConfig,
    ModelConfig,
    PolicyConfig,
    Recipe,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    WarmupConfig,
)
from cosmos_core.control.journal import entries, replay
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import EVENTS, RunEnded
from cosmos_core.errors import JournalError, ReplicaError
from cosmos_core.replica.client import ControlClient
from cosmos_core.transport import key_folder, sockets
from cosmos_core.transport.key_folder import Wanted
from cosmos_core.transport.keys import person_key, replica_key
from cosmos_core.transport.messages import (
    DOWN,
    REQUEST,
    UP,
    WIRE_VERSION,
    Command,
    Hello,
    Notices,
    Refused,
    Stop,
    Watch,
)
from tests.simulation.replicas import FakePolicy, FakeRollout, World

pytestmark = pytest.mark.timeout(120)


def make_job(directory: Path, *, steps: int = 4, mode: str = "async", **control) -> Job:
    recipe = Recipe(
        run=RunConfig(name="test", output_dir=str(directory.parent), steps=steps, seed=3),
        model=ModelConfig(config={}),
        algorithm=AlgorithmConfig(plugin="grpo"),
        dataset=DatasetConfig(plugin="arithmetic"),
        reward=(RewardConfig(plugin="right"),),
        warmup=WarmupConfig(plugin="sft", steps=2, prompts_per_step=3),
        policy=PolicyConfig(replicas=2, prompts_per_step=4),
        rollout=RolloutConfig(replicas=2, group_size=4, max_in_flight=16),
        sync=SyncConfig(mode=mode, max_staleness=0 if mode == "sync" else 2),
        evaluation=EvaluationConfig(interval=2, prompts=6),
        control=ControlConfig(**{"heartbeat_s": 0.3, "lost_after_s": 3.0, "join_timeout_s": 20.0} | control),
    )
    job = Job(
        run_id="run-1",
        directory=directory,
        recipe_directory=directory,
        recipe=recipe,
        num_train_rows=50,
        num_heldout_rows=10,
        num_evaluation_prompts=6,
        uses_rollouts=True,
        stages=(StageFacts(source="demonstrations"), StageFacts(source="rollouts", min_group_size=2)),
    )
    save_job(job)
    if not job.keys.exists():
        replicas = (Wanted(role="policy", name="p*"), Wanted(role="rollout", name="r*"))
        key_folder.make(job.keys, (*replicas, Wanted(role="person", name="anna")))
    return job


def free_port() -> int:
    with network.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Controller:
    """The controller's process."""

    def __init__(self, job: Job, *arguments: str) -> None:
        self.announcement = job.directory / "controller.json"
        self.announcement.unlink(missing_ok=True)
        command = [sys.executable, "-m", "cosmos_core.control", "--run", str(job.directory), *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def announced(self) -> dict:
        deadline = time.monotonic() + 60
        while not self.announcement.exists():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline, "the controller did not announce itself"
            time.sleep(0.01)
        return json.loads(self.announcement.read_text())

    def wait(self) -> tuple[int, str]:
        _, complaints = self.process.communicate(timeout=40)
        return self.process.returncode, complaints


@pytest.fixture
def start():
    controllers = []

    def begin(job: Job, *arguments: str) -> Controller:
        controllers.append(Controller(job, *arguments))
        return controllers[-1]

    yield begin
    for controller in controllers:
        controller.process.kill()
        controller.process.communicate()


class Replica(threading.Thread):
    """A fake behind a real line to the controller."""

    def __init__(self, job: Job, address: str, name: str, world: World, *, step: int = 0, pause_s: float = 0.0) -> None:
        super().__init__(name=name, daemon=True)
        incarnation = f"{name}-{os.urandom(4).hex()}"
        role = "policy" if name.startswith("p") else "rollout"
        self.fake = (
            FakePolicy(world, name, incarnation, step)
            if role == "policy"
            else FakeRollout(world, incarnation, drop_every=5)
        )
        hello = Hello(
            wire=WIRE_VERSION,
            run_id=job.run_id,
            name=name,
            role=role,
            incarnation=incarnation,
            host="host",
            pid=os.getpid(),
            step=step,
            endpoints=self.fake.endpoints,
        )
        key = replica_key(job.keys, role, name)
        self.client = ControlClient(address, hello, job.recipe.control.heartbeat_s, lambda: {"speed": 1.0}, key=key)
        self.pause_s = pause_s
        self.error: Exception | None = None
        self.flushed = False
        self.start()

    def run(self) -> None:
        self.client.start()
        try:
            self.serve()
        except ReplicaError as error:
            self.error = error
        finally:
            self.client.close()

    def serve(self) -> None:
        revision, body = 0, None
        while body is None or not body.stop:
            directive = self.client.wait_directive(revision, 0.02)
            if directive is not None:
                revision, body = directive.revision, directive.policy or directive.rollout
            for report in self.fake.follow(body) if body is not None and not body.stop else ():
                self.client.report(report)
            time.sleep(self.pause_s)
        self.flushed = self.client.flush(5.0)


def team(job: Job, address: str, world: World, **options) -> list[Replica]:
    return [Replica(job, address, name, world, **options) for name in ("p0", "p1")] + [
        Replica(job, address, name, world, pause_s=options.get("pause_s", 0.0)) for name in ("r0", "r1")
    ]


def join(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.join(20)
        assert not replica.is_alive(), replica.name
        assert replica.error is None, replica.error
        assert replica.flushed


class Watcher(threading.Thread):
    """An observer that keeps everything it is told."""

    def __init__(self, job: Job, address: str, run_id: str = "run-1") -> None:
        super().__init__(daemon=True)
        self.context = zmq.Context()
        key = person_key(job.keys)
        curve = sockets.Curve(own=key.pair, server=key.server)
        self.socket = sockets.dealer(self.context, address, b"watcher", queued=True, curve=curve)
        self.run_id = run_id
        self.entries: list[tuple[int, float, bytes]] = []
        self.gauges: dict[str, dict[str, float]] = {}
        self.refusal = ""
        self.wants_stop = False
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        self.say(Watch(run_id=self.run_id, after=0))
        while not self.done.is_set():
            if self.wants_stop:
                self.wants_stop = False
                self.say(Command(run_id=self.run_id, ident="stop", request=REQUEST.encode(Stop())))
            if not self.socket.poll(50):
                continue
            message = DOWN.decode(self.socket.recv())
            match message:
                case Notices():
                    self.entries += message.entries
                    self.gauges |= message.gauges
                    if self.entries and isinstance(EVENTS.decode(self.entries[-1][2]), RunEnded):
                        break
                case Refused():
                    self.refusal = message.reason
                    break
        self.socket.close()
        self.context.term()

    def say(self, message: Watch | Command) -> None:
        sockets.offer(self.socket, [UP.encode(message)])

    def end(self) -> None:
        self.join(10)
        self.done.set()
        self.join()


def test_a_whole_run(tmp_path, start):
    job = make_job(tmp_path / "run")
    controller = start(job)
    announced = controller.announced()
    assert announced["pid"] == controller.process.pid
    assert announced["term"] == 1
    watcher = Watcher(job, announced["address"])
    world = World()
    replicas = team(job, announced["address"], world, pause_s=0.01)
    join(replicas)
    assert controller.wait() == (0, "")
    watcher.end()
    state = replay(job.journal)
    assert (state.outcome, state.step, state.has_ended) == ("finished", 6, True)
    assert [done.version for done in state.evaluations] == [2, 4, 6]
    assert world.policies["p0"].digest == world.policies["p1"].digest == world.checkpoints[6]
    # The observer saw every entry once, in order, and comes to the same state.
    assert [entry[0] for entry in watcher.entries] == [entry[0] for entry in entries(job.journal)]
    assert core.fold(EVENTS.decode(entry[2]) for entry in watcher.entries) == state
    assert watcher.gauges["r0"] == {"speed": 1.0}
    assert "in_flight" in watcher.gauges["controller"]
    log = (job.logs / "controller.jsonl").read_text()
    assert "listening on" in log


def test_a_controller_that_is_killed_goes_on_where_it_was(tmp_path, start):
    job = make_job(tmp_path / "run", steps=12, port=free_port())
    first = start(job)
    world = World()
    replicas = team(job, first.announced()["address"], world, pause_s=0.02)
    deadline = time.monotonic() + 20
    while world.policies["p0"].step < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    before = replay(job.journal)
    assert before.step >= 4
    second = start(job)
    assert second.announced()["term"] == 2
    join(replicas)
    assert second.wait() == (0, "")
    state = replay(job.journal)
    assert (state.outcome, state.step) == ("finished", 14)
    assert not state.fenced
    assert state.steps[: before.step] == before.steps


def test_a_stopped_and_resumed_run_trains_the_same_as_one_in_one_piece(tmp_path, start):
    whole = World()
    job = make_job(tmp_path / "whole", steps=8, mode="sync")
    controller = start(job)
    join(team(job, controller.announced()["address"], whole))
    assert controller.wait() == (0, "")

    parts = World()
    job = make_job(tmp_path / "parts", steps=8, mode="sync")
    controller = start(job)
    address = controller.announced()["address"]
    watcher = Watcher(job, address)
    replicas = team(job, address, parts, pause_s=0.02)
    deadline = time.monotonic() + 20
    while parts.policies["p0"].step < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    watcher.wants_stop = True
    join(replicas)
    assert controller.wait() == (0, "")
    watcher.end()
    stopped = replay(job.journal)
    assert stopped.outcome == "stopped"
    assert stopped.step < 10

    controller = start(job)
    code, complaints = controller.wait()
    assert code == 1
    assert "go on with --resume" in complaints
    controller = start(job, "--resume-step", str(stopped.step))
    join(team(job, controller.announced()["address"], parts, step=stopped.step))
    assert controller.wait() == (0, "")
    state = replay(job.journal)
    assert (state.outcome, state.step) == ("finished", 10)
    assert parts.checkpoints[10] == whole.checkpoints[10]
    assert [done.version for done in state.evaluations] == [2, 4, 6, 8, 10]


def test_a_port_in_use_is_named(tmp_path, start):
    with network.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, complaints = start(make_job(tmp_path / "run", port=port)).wait()
    assert code == 1
    assert f":{port} " in complaints
    assert "set control.port" in complaints
    assert "in use" in complaints
    assert "Traceback" not in complaints


def test_a_second_controller_is_refused_and_harms_nothing(tmp_path, start):
    job = make_job(tmp_path / "run")
    first = start(job)
    first.announced()
    second = start(job)
    code, complaints = second.wait()
    assert code == 1
    assert "another controller has it open" in complaints
    with pytest.raises(JournalError, match="another controller has it open"):
        replay(job.journal)
    assert first.process.poll() is None


def test_replicas_that_do_not_come_end_the_run(tmp_path, start):
    job = make_job(tmp_path / "run", join_timeout_s=5.0)
    controller = start(job)
    world = World()
    replica = Replica(job, controller.announced()["address"], "p0", world)
    code, complaints = controller.wait()
    assert code == 1
    assert "1 of 2 policy replicas and 2 of 2 rollout replicas" in complaints
    join([replica])
    assert replay(job.journal).outcome == "failed"


def test_strangers_are_refused(tmp_path, start):
    job = make_job(tmp_path / "run")
    controller = start(job)
    address = controller.announced()["address"]
    watcher = Watcher(job, address, run_id="run-2")
    watcher.end()
    assert "run-1" in watcher.refusal
    replica = Replica(attrs.evolve(job, run_id="run-2"), address, "p0", World())
    replica.join(10)
    assert "it belongs to run run-2" in str(replica.error)


def test_sigterm_ends_it_promptly_and_the_run_can_go_on(tmp_path, start):
    job = make_job(tmp_path / "run")
    controller = start(job)
    controller.announced()
    controller.process.send_signal(signal.SIGINT)
    controller.process.send_signal(signal.SIGTERM)
    code, _ = controller.wait()
    assert code == 143
    assert not replay(job.journal).has_ended
    assert start(job).announced()["term"] == 2
