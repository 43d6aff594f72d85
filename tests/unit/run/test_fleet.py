"""Replicas start and end whole, and are told apart from those that they replace."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.control.machine.state import Replica
from cosmos_core.run.fleet import Fleet
from cosmos_core.run.launch import Exit, ProcessSpec


class Recorder:
    """A launcher that starts nothing."""

    def __init__(self):
        self.started = []
        self.killed = []

    def start(self, spec):
        self.started.append(spec)

    def kill(self, name):
        self.killed.append(name)


@attrs.define
class RunState:
    """What a fleet looks at of a run's state."""

    replicas: dict = attrs.field(factory=dict)
    fenced: dict = attrs.field(factory=dict)
    departed: set = attrs.field(factory=set)


@pytest.fixture
def launcher():
    return Recorder()


def make_fleet(launcher):
    names = ("policy-0", "policy-0.1", "rollout-0")
    specs = [ProcessSpec(name=name, module="m", arguments=("--session", "first")) for name in names]
    fleet = Fleet(launcher, specs)
    fleet.start_all()
    return fleet


@pytest.fixture
def fleet(launcher):
    return make_fleet(launcher)


def option(spec, name):
    words = list(spec.arguments)
    return words[len(words) - words[::-1].index(name)]


def ended(name, code=-9):
    return Exit(name=name, code=code, error="")


def test_each_start_has_a_session_and_incarnations_of_its_own(fleet, launcher):
    leader, follower, rollout = launcher.started
    assert option(leader, "--session") == option(follower, "--session") != "first"
    assert option(rollout, "--session") == "first"
    fleet.note(ended("policy-0.1"), 0.0)
    fleet.note(ended("policy-0", 75), 0.1)
    (member,) = fleet.gone(0.1)
    fleet.start(member)
    again = launcher.started[3:]
    assert [spec.name for spec in again] == ["policy-0", "policy-0.1"]
    assert option(again[0], "--session") == option(again[1], "--session") != option(leader, "--session")
    assert len({option(spec, "--incarnation") for spec in launcher.started}) == 5
    assert fleet.gone(9.0) == []


def test_who_is_given_up_and_runs_all_the_same_is_told_of(fleet, launcher):
    # Who has left as it was asked to may end by itself.
    state = RunState(fenced={option(launcher.started[2], "--incarnation"): "it has left"}, departed={"rollout-0"})
    assert fleet.look(state) == []
    incarnation = option(launcher.started[2], "--incarnation")
    state = RunState()
    assert fleet.look(state) == []
    state.replicas["rollout-0"] = Replica(
        name="rollout-0", role="rollout", incarnation="of another", host="h", pid=1, endpoints={}
    )
    assert fleet.look(state) == []
    state.replicas["rollout-0"].incarnation = incarnation
    assert fleet.look(state) == []
    state.fenced[incarnation] = "rollout-0: silent for 15 s"
    (member,) = fleet.look(state)
    assert (member.name, member.has_joined) == ("rollout-0", True)
    fleet.kill(member)
    assert launcher.killed == ["rollout-0"]


def test_a_replica_is_gone_when_all_of_it_is_and_what_ended_first_is_why(fleet, launcher):
    # Of a replica that never joined that is known.
    fleet.look(RunState())
    fleet.note(ended("rollout-0", 1), 0.0)
    (member,) = fleet.gone(0.0)
    assert not member.has_joined
    fleet.forget(member)
    fleet.note(ended("policy-0.1", -9), 0.0)
    assert fleet.gone(1.0) == []
    assert launcher.killed == []
    assert fleet.gone(4.0) == []
    assert launcher.killed == ["policy-0"]
    fleet.note(ended("policy-0", 1), 4.1)
    (member,) = fleet.gone(4.1)
    assert (member.name, member.first.name, member.first.code) == ("policy-0", "policy-0.1", -9)
    fleet.forget(member)
    assert fleet.gone(4.2) == []


def test_what_ended_a_replica_is_told_from_what_that_took_along(launcher):
    for exits, why in [
        ([("policy-0.1", 1), ("policy-0", 1)], ("policy-0.1", 1)),  # the leader was told of a failure
        ([("policy-0.1", 1), ("policy-0", 75)], ("policy-0", 75)),  # it was told of none
        ([("policy-0.1", 1), ("policy-0", 77)], ("policy-0", 77)),
        ([("policy-0", 75), ("policy-0.1", -9)], ("policy-0.1", -9)),  # seen after those that it took along
    ]:
        fleet = make_fleet(launcher)
        for name, code in exits:
            fleet.note(ended(name, code), 0.0)
        (member,) = fleet.gone(0.0)
        assert (member.first.name, member.first.code) == why, exits


def test_who_was_killed_here_is_never_why(fleet, launcher):
    fleet.note(ended("policy-0.1", 75), 0.0)
    fleet.gone(4.0)
    assert launcher.killed == ["policy-0"]
    fleet.note(ended("policy-0", -9), 4.1)
    (member,) = fleet.gone(4.2)
    assert (member.first.name, member.first.code) == ("policy-0.1", 75)
    fleet.start(member)
    fleet.kill(member)
    fleet.note(ended("policy-0", -9), 5.0)
    fleet.note(ended("policy-0.1", 1), 5.0)
    (member,) = fleet.gone(5.1)
    assert (member.first.name, member.first.code) == ("policy-0.1", 1)
