"""What a supervisor makes of the end of a process."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.control.machine.state import Replica
from cosmos_core.run import restart_policy
from cosmos_core.run import supervisor as supervise
from cosmos_core.run.fleet import Fleet, replica_specs
from cosmos_core.run.follower import Follower
from cosmos_core.run.launch import Exit
from cosmos_core.run.restart_policy import RestartPolicy
from cosmos_core.run.supervisor import Supervisor
from cosmos_core.transport import key_folder
from cosmos_core.transport.messages import Lost
from cosmos_service_tools import allow_list


class Launcher:
    """Starts nothing; its processes end when a test says so."""

    def __init__(self):
        self.started = []
        self.killed = []
        self.ended = []

    def start(self, spec):
        self.started.append(spec)

    def kill(self, name):
        self.killed.append(name)

    def running(self):
        return [spec.name for spec in self.started]

    def exits(self):
        found, self.ended = self.ended, []
        return found


class Line:
    """An observer that nobody answers."""

    last_sequence = 0
    silence_s = 0.0


class Said(list):
    """A view that notes what it is to say."""

    def say(self, message):
        self.append(message)


class Scene:
    """A run of two replicas of each role, all of which have joined."""

    def __init__(self, job, history, *, restarts):
        recipe = attrs.evolve(
            job.recipe,
            policy=attrs.evolve(job.recipe.policy, replicas=2),
            rollout=attrs.evolve(job.recipe.rollout, replicas=2),
            launch=attrs.evolve(job.recipe.launch, restarts=restarts),
        )
        job = attrs.evolve(job, recipe=recipe)
        self.job, self.launcher, self.said, self.line = job, Launcher(), Said(), Line()
        follower = Follower()
        follower.fold(history.entries)
        self.state = follower.state
        self.state.has_started = True
        self.supervisor = Supervisor(job, self.launcher, self.said, lambda *_, **__: None, follower)
        key_folder.ensure(job.keys)
        self.fleet = Fleet(self.launcher, replica_specs(job, "tcp://127.0.0.1:1", None))
        self.supervisor._restart_policy = RestartPolicy(job, self.fleet, self.supervisor._requests)
        self.members = {member.name: member for member in self.fleet.start_all()}
        self.launcher.started.clear()
        for name, member in self.members.items():
            self.state.replicas[name] = Replica(
                name=name,
                role=name.partition("-")[0],
                incarnation=member.incarnation,
                host="h",
                pid=1,
                endpoints={},
            )
        self.turn()

    def turn(self, *exits):
        self.launcher.ended = [Exit(name=name, code=code, error=error) for name, code, error in exits]
        self.supervisor._watch_exits(self.line)

    @property
    def requests(self):
        return [*self.supervisor._requests._pending.values()]

    @property
    def failure(self):
        return self.supervisor._failure


@pytest.fixture
def make(job, history, monkeypatch):
    monkeypatch.setattr(restart_policy, "_VERDICT_S", 0.0)
    return lambda restarts=3: Scene(job, history, restarts=restarts)


def started(scene):
    return [spec.name for spec in scene.launcher.started]


def test_a_killed_replica_is_told_of_and_started_again(make):
    for code in (-9, 75, 143):
        scene = make()
        incarnation = scene.members["rollout-0"].incarnation
        scene.turn(("rollout-0", code, ""))
        assert started(scene) == ["rollout-0"], code
        (lost,) = scene.requests
        assert isinstance(lost, Lost)
        assert (lost.name, lost.incarnation) == ("rollout-0", incarnation)
        assert scene.members["rollout-0"].incarnation != incarnation
        assert scene.failure is None
        assert "rollout-0 is started again" in scene.said[0]


def test_an_error_of_its_own_is_the_runs_unless_all_is_said(make):
    # An error of its own is the runs.
    scene = make()
    scene.turn(("policy-0", 1, "the loss is no number"))
    scene.turn()
    assert started(scene) == []
    assert scene.failure.error == "the loss is no number"
    assert scene.said == ["policy-0 ended: the loss is no number (exit code 1)"]

    # One that was refused before it had joined is not tried again.
    scene = make()
    scene.members["rollout-0"].has_joined = False
    del scene.state.replicas["rollout-0"]
    scene.turn(("rollout-0", 77, "it speaks wire version 1"))
    assert started(scene) == []
    assert scene.failure.error == "it speaks wire version 1"

    # When all is said nothing is started again.
    scene = make()
    scene.state.outcome = "finished"
    scene.turn(("rollout-0", -9, ""), ("policy-0", 1, "late"))
    assert (started(scene), scene.failure, scene.said) == ([], None, [])


def test_one_whose_key_was_revoked_or_is_gone_is_not_started_again_and_the_run_goes_on(make, job):
    make()
    allow_list.revoke(job.keys, "rollout")
    for code in (77, -9):
        scene = make()
        scene.state.has_rollouts = True
        scene.state.fenced[scene.members["rollout-0"].incarnation] = "rollout-0: its key was revoked"
        scene.turn()
        scene.turn(("rollout-0", code, ""))
        scene.turn()
        assert (started(scene), scene.failure, scene.requests) == ([], None, []), code
        (words,) = scene.said
        assert words.startswith("rollout-0: its key was revoked; ")
        assert words.endswith("rollout-0 is not started again, the run goes on without it")
    scene = make()
    scene.state.has_rollouts = True
    (scene.job.keys / "rollout.key").unlink()
    scene.turn(("rollout-1", -9, ""))
    assert (started(scene), scene.failure) == ([], None)
    assert "no key with which a rollout replica may be called 'rollout-1'" in scene.said[0]


def test_one_that_dies_again_and_again_is_done_without_while_others_are_left(make):
    scene = make(restarts=1)
    scene.turn(("rollout-0", -9, ""))
    scene.turn(("rollout-0", -9, ""))
    assert started(scene) == ["rollout-0"]
    assert scene.failure is None
    assert "the run goes on without it" in scene.said[-1]
    scene.state.replicas = {name: each for name, each in scene.state.replicas.items() if name != "rollout-0"}
    scene.turn(("rollout-1", -9, ""))
    scene.turn(("rollout-1", -9, ""))
    assert started(scene) == ["rollout-0", "rollout-1"]
    assert scene.failure.name == "rollout-1"


def test_one_that_hangs_is_replaced_and_one_that_has_left_stays_away(make):
    # One that hangs is killed and replaced.
    scene = make()
    member = scene.members["policy-1"]
    scene.state.fenced[member.incarnation] = "policy-1: silent for 15 s"
    scene.turn()
    assert scene.launcher.killed == ["policy-1"]
    scene.turn(("policy-1", -9, ""))
    assert started(scene) == ["policy-1"]
    assert scene.requests == []
    assert scene.said == ["policy-1: silent for 15 s; policy-1 is started again"]

    # One that has left stays away.
    scene = make()
    scene.state.fenced[scene.members["rollout-1"].incarnation] = "rollout-1: it has left"
    scene.state.departed.add("rollout-1")
    scene.turn(("rollout-1", 0, ""))
    scene.turn()
    assert (started(scene), scene.launcher.killed, scene.failure) == ([], [], None)
    assert scene.said == [], "said once, when the controller says it (TerminalLog)"


def test_a_killed_controller_comes_back_at_its_port_and_goes_on_where_it_was(make):
    scene = make(restarts=1)
    scene.supervisor._port = 4711
    scene.turn(("controller", -9, ""))
    (spec,) = scene.launcher.started
    assert spec.name == "controller"
    assert spec.arguments[-2:] == ("--port", "4711")
    assert "--resume-step" not in spec.arguments
    scene.turn(("controller", -9, ""))
    assert scene.failure.name == "controller"

    # An error of the controllers ends the run.
    scene = make()
    scene.turn(("controller", 1, "the disk is full"))
    assert started(scene) == []
    assert scene.failure.error == "the disk is full"


def test_when_the_run_is_over_replicas_that_never_joined_are_ended_at_once(make):
    scene = make()
    for name in ("rollout-1", "policy-0"):
        scene.members[name].has_joined = False
    # The last notices may tell that one has joined.
    del scene.state.replicas["rollout-1"]
    scene.state.outcome = "stopped"
    scene.supervisor._follower.has_ended = True
    scene.turn(("controller", 0, ""))
    assert scene.launcher.killed == ["rollout-1"]
    scene.turn(("rollout-1", -9, ""))
    assert (started(scene), scene.failure, scene.said) == ([], None, [])


def test_a_controller_that_says_nothing_is_ended_once(make, monkeypatch):
    scene = make()
    scene.launcher.start(scene.members["policy-0"].specs[0].__class__(name="controller", module="m", arguments=()))
    scene.line.silence_s = 1e6
    scene.supervisor._watch_silence(scene.line)
    scene.supervisor._watch_silence(scene.line)
    assert scene.launcher.killed == ["controller"]

    # A controller that never says anything is ended when it had the time to start.
    scene = make()
    scene.launcher.start(scene.members["policy-0"].specs[0].__class__(name="controller", module="m", arguments=()))
    now = 1000.0
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now)
    scene.line.silence_s = float("inf")
    scene.supervisor._controller_since = now
    for _ in range(4):
        now += 19.0
        scene.supervisor._watch_silence(scene.line)
        assert scene.launcher.killed == (["controller"] if now > 1060 else [])
    # The one after it was not heard either: its time counts from its own start.
    scene.line.silence_s = 100.0
    for _ in range(4):
        now += 19.0
        scene.supervisor._watch_silence(scene.line)
        scene.line.silence_s += 19.0
    assert scene.launcher.killed == ["controller"] * 2


def test_while_the_controller_is_not_heard_no_pace_is_shown_and_the_clock_stands(make, history, monkeypatch):
    scene = make()
    begun, heard = history.entries[1][1], history.entries[-1][1] + 4.0
    monkeypatch.setattr(supervise.time, "time", lambda: heard + 1.0)
    shown = scene.supervisor._progress(1.0)
    assert (shown.phase, shown.elapsed_s) == ("warm-up", heard + 1.0 - begun)
    monkeypatch.setattr(supervise.time, "time", lambda: heard + 9.0)
    shown = scene.supervisor._progress(9.0)
    assert (shown.phase, shown.elapsed_s) == ("waiting for the controller", heard - begun)
    assert shown.policy_units_per_s is shown.eta_s is None
    scene.state.outcome = "finished"
    assert scene.supervisor._progress(9.0).phase == "finished"
