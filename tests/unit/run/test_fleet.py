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
class Standing:
    """What a fleet looks at of a run's state."""

    replicas: dict = attrs.field(factory=dict)
    fenced: dict = attrs.field(factory=dict)
    departed: set = attrs.field(factory=set)


@pytest.fixture
def launcher():
    return Recorder()


@pytest.fixture
def fleet(launcher):
    names = ("policy-0", "policy-0.1", "rollout-0")
    specs = [ProcessSpec(name=name, module="m", arguments=("--session", "first")) for name in names]
    fleet = Fleet(launcher, specs)
    fleet.start_all()
    return fleet


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


def test_a_replica_is_gone_when_all_of_it_is_and_what_ended_first_is_why(fleet, launcher):
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


def test_who_is_given_up_and_runs_all_the_same_is_told_of(fleet, launcher):
    incarnation = option(launcher.started[2], "--incarnation")
    state = Standing()
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


def test_who_has_left_as_it_was_asked_to_may_end_by_itself(fleet, launcher):
    state = Standing(fenced={option(launcher.started[2], "--incarnation"): "it has left"}, departed={"rollout-0"})
    assert fleet.look(state) == []


def test_of_a_replica_that_never_joined_that_is_known(fleet):
    fleet.look(Standing())
    fleet.note(ended("rollout-0", 1), 0.0)
    (member,) = fleet.gone(0.0)
    assert not member.has_joined


@pytest.mark.parametrize("code", [75, 77])
def test_what_a_leader_ends_with_that_was_told_of_no_failure_is_why(fleet, code):
    fleet.note(ended("policy-0.1", 1), 0.0)
    fleet.note(ended("policy-0", code), 0.1)
    (member,) = fleet.gone(0.2)
    assert (member.first.name, member.first.code) == ("policy-0", code)


def test_a_failure_that_a_leader_was_told_of_is_why(fleet):
    fleet.note(ended("policy-0.1", 1), 0.0)
    fleet.note(ended("policy-0", 1), 0.1)
    (member,) = fleet.gone(0.2)
    assert member.first.name == "policy-0.1"


def test_who_was_killed_is_why_though_those_that_it_took_along_are_seen_first(fleet):
    fleet.note(ended("policy-0", 75), 0.0)
    fleet.note(ended("policy-0.1", -9), 0.0)
    (member,) = fleet.gone(0.0)
    assert (member.first.name, member.first.code) == ("policy-0.1", -9)


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
