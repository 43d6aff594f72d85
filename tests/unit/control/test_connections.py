"""Who is given up: by silence, by a closed connection, by work that does not get on."""

from __future__ import annotations

import pytest

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import GroupStalled, ReplicaLost, RunOpened
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.transport.messages import WIRE_VERSION, Beat, Directive, Hello, Reports
from cosmos_core.transport.reports import REPORT, GenerationFormed

CONTROL = ControlConfig(heartbeat_s=1.0, lost_after_s=10.0, join_timeout_s=1000.0, progress_timeout_s=20.0)


class Room:
    """A server loop with two policy replicas that beat each second, and may be gone."""

    def __init__(self, settings) -> None:
        self.events = []
        self.server_loop = ServerLoop(core.begin(RunOpened(settings=settings)), self, CONTROL, 0.0)
        self.server_loop.state.term = 1
        self.now = 0.0
        self.gone, self.asked = set(), []
        self.beats = {"p0": ("", False), "p1": ("", False)}
        self.progress = dict.fromkeys(self.beats, 0)
        for name in self.beats:
            self.take(
                Hello(
                    wire=WIRE_VERSION,
                    run_id="run",
                    name=name,
                    role="policy",
                    incarnation=f"{name}#1",
                    host="host",
                    pid=1,
                    step=0,
                    endpoints={"store": "s", "weights": "w"},
                )
            )
        for name in self.beats:
            formed = REPORT.encode(GenerationFormed(generation=1, step=0))
            self.take(Reports(name=name, incarnation=f"{name}#1", term=1, first=1, reports=(formed,)))

    def append(self, event):
        self.events.append(event)
        return len(self.events)

    def commit(self):
        return 0

    def take(self, message):
        self.server_loop.take(message.name.encode(), message, self.now)

    def is_there(self, name, line):
        self.asked.append((self.now, name))
        return name not in self.gone

    def wait(self, seconds):
        """Time passes; those with an entry in `beats` beat."""
        for _ in range(seconds):
            self.now += 1.0
            for name, (doing, waits) in self.beats.items():
                self.take(
                    Beat(
                        name=name,
                        incarnation=f"{name}#1",
                        term=1,
                        revision=9,
                        gauges={},
                        progress=self.progress[name],
                        doing=doing,
                        waits=waits,
                    )
                )
            self.server_loop.failure_detector.look(self.now, self.is_there)

    def lost(self):
        return {event.name: event.reason for event in self.events if isinstance(event, ReplicaLost)}


@pytest.fixture
def make_room(settings):
    return lambda: Room(settings(warmup=2, policy_replicas=2, rollout_replicas=0))


def test_a_closed_connection_is_noticed_within_seconds_and_silence_later(make_room):
    room = make_room()
    room.wait(5)
    assert room.asked == []
    del room.beats["p1"]
    room.gone.add("p1")
    room.wait(2)
    assert room.lost() == {}
    room.wait(1)
    assert room.lost() == {"p1": "its connection is closed: its process has ended, or cannot be reached"}

    room = make_room()
    del room.beats["p1"]
    room.wait(10)
    assert room.lost() == {}
    room.wait(1)
    assert room.lost() == {"p1": "silent for 10 s (control.lost_after_s)"}


def test_one_that_beats_and_does_not_get_on_is_given_up_and_no_other(make_room):
    room = make_room()
    room.beats["p1"] = ("training step 3, attempt 1", False)
    room.wait(20)
    assert room.lost() == {}
    room.wait(2)
    assert room.lost() == {
        "p1": "hung: no progress for 21 s (control.progress_timeout_s) while training step 3, attempt 1"
    }
    directive = [message for _, message in room.server_loop.commit(room.now) if isinstance(message, Directive)]
    assert directive[-1].policy.generation.members == ("p0",)

    room = make_room()
    for number in range(60):
        room.beats["p1"] = ("training step 3, attempt 1", False)
        room.progress["p1"] = number // 15
        room.wait(1)
    room.beats["p1"] = ("", False)
    room.wait(60)
    assert room.lost() == {}


def test_who_waits_for_others_is_not_to_blame(make_room):
    room = make_room()
    room.beats = {"p0": ("waiting for the other members of generation 1", True), "p1": ("training step 1", False)}
    room.wait(25)
    assert list(room.lost()) == ["p1"]
    assert not any(isinstance(event, GroupStalled) for event in room.events)

    room = make_room()
    room.beats["p0"] = ("waiting for the other members of generation 1", True)
    for number in range(60):
        room.beats["p1"] = ("training step 1", False)
        room.progress["p1"] = number
        room.wait(1)
    assert room.lost() == {}
    assert not any(isinstance(event, GroupStalled) for event in room.events)


def test_a_group_whose_members_all_wait_is_formed_anew(make_room):
    room = make_room()
    waiting = ("waiting for the other members of generation 1", True)
    room.beats = {"p0": waiting, "p1": waiting}
    room.wait(22)
    assert [event for event in room.events if isinstance(event, GroupStalled)] == [
        GroupStalled(generation=1, timeout_s=20.0)
    ]
    assert room.lost() == {}
    assert "no member made progress for 20 s" in room.server_loop.state.status_details["generation"]
    room.beats = {"p0": ("", False), "p1": ("", False)}
    room.wait(2)
    assert room.server_loop.state.generation.order.generation == 2


def test_a_pause_of_the_controller_is_nobodys_fault(make_room):
    room = make_room()
    room.beats["p1"] = ("training step 1", False)
    room.wait(10)
    room.now += 300.0
    room.server_loop.failure_detector.look(room.now, room.is_there)
    assert room.lost() == {}


def test_of_those_who_left_no_line_is_kept(make_room):
    room = make_room()
    room.gone.add("p1")
    del room.beats["p1"]
    room.wait(5)
    assert [name for name, _ in room.server_loop.lines.items()] == ["p0"]
    room.server_loop.commit(room.now)
    assert list(room.server_loop.lines._lines) == ["p0"]
