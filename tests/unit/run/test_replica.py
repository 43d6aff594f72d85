"""A replica that joins a run: how it ends, at a controller that tells what a test says."""

from __future__ import annotations

import json
import os
import signal

import pytest

from cosmos_core.replica.lifetime import REFUSED
from cosmos_core.run.address import address_file
from cosmos_core.run.launch import Exit
from cosmos_core.transport import key_folder
from cosmos_core.transport.addresses import host_id
from cosmos_core.transport.sockets import Closing
from cosmos_service_tools import allow_list
from cosmos_service_tools import joining as new
from cosmos_service_tools.joining import NewReplica, join

ADDRESS = "tcp://127.0.0.1:1"


class Line(Closing):
    """An observer whose controller is heard for some polls, and then no more."""

    num_gauges = 1
    refusal = ""

    def __init__(self, history, heard):
        self.entries, self.heard, self.is_closed = list(history.entries), heard, False
        self.answers = {}
        self.on_poll = lambda: None

    def poll(self, timeout_s):
        self.heard -= 1
        self.on_poll()
        found, self.entries = self.entries, []
        return found

    @property
    def silence_s(self):
        return 0.0 if self.heard > 0 else 12.0

    def ask(self, request, ident):
        pass

    def close(self):
        self.is_closed = True


class Launcher:
    """Starts nothing; being stopped, it is interrupted again."""

    def __init__(self, logs):
        self.started, self.ended, self.is_stopped = [], [], False

    def start(self, spec):
        self.started.append(spec)

    def exits(self):
        found, self.ended = self.ended, []
        return found

    def running(self):
        return []

    def kill(self, name):
        pass

    def stop(self, grace_s):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        self.is_stopped = True


@pytest.fixture
def announce(job):
    job.directory.mkdir()

    def announce(address):
        found = {"address": address, "pid": os.getpid(), "host": host_id()}
        address_file(job).write_text(json.dumps(found))

    announce(ADDRESS)
    return announce


@pytest.fixture
def joined(job, history, announce, monkeypatch):
    """Join the run of `history` at a line that is heard for some polls; the exit code, and what was said."""

    launchers = []

    def joined(line, name="rollout-x"):
        said = []
        key_folder.ensure(job.keys)
        monkeypatch.setattr(new, "person_key", lambda keys, **_: None)
        monkeypatch.setattr(new, "Observer", lambda *_: line)
        monkeypatch.setattr(new, "LocalLauncher", lambda logs: launchers.append(Launcher(logs)) or launchers[0])
        code = join(NewReplica(job=job, address=ADDRESS, role="rollout", name=name), said.append)
        assert line.is_closed
        assert launchers[0].is_stopped
        return code, said

    joined.launchers = launchers
    return joined


def test_a_run_that_goes_on_elsewhere_is_left_with_the_reason(history, joined, announce):
    line = Line(history, heard=5)
    line.on_poll = lambda: announce("tcp://127.0.0.1:2") if line.heard == -3 else None
    code, said = joined(line)
    assert code == 75
    assert said[1] == (
        f"rollout-x: the controller at {ADDRESS} has said nothing for 12 s; waiting for it (Ctrl-C twice ends this)"
    )
    assert len(said) == 3
    assert "ends: the run goes on with another controller, at tcp://127.0.0.1:2; join it again with" in said[2]


def test_interrupts_while_it_ends_leave_nothing_behind(history, joined):
    line = Line(history, heard=5)
    line.on_poll = lambda: os.kill(os.getpid(), signal.SIGINT) if line.heard in (2, 1) else None
    code, said = joined(line)
    assert code == 130
    assert "killed by a second Ctrl-C" in said[-1]


def test_progress_is_not_told_while_the_controller_is_away(history, joined, announce, monkeypatch):
    monkeypatch.setattr(new, "_SHOW_S", 0.0)
    history.join()
    name = next(name for name in history.state.replicas if name.startswith("rollout"))
    line = Line(history, heard=10)
    line.on_poll = lambda: announce("tcp://127.0.0.1:2") if line.heard == -10 else None
    # The replica of this name is the one that joined.
    monkeypatch.setattr(new._Session, "check", lambda session: None)
    _, said = joined(line, name)
    told = [index for index, words in enumerate(said) if ": step " in words]
    silent = next(index for index, words in enumerate(said) if "has said nothing" in words)
    assert told
    assert max(told) < silent


def dying(history, joined, *, times, code=-9, interrupted=False):
    """A line during which the replica ends so often, one poll after the other, and which is lost then."""
    line = Line(history, heard=40)

    def on_poll():
        (launcher,) = joined.launchers
        if launcher.started and times >= len(launcher.started):
            launcher.ended.append(Exit(name="rollout-x", code=code, error=""))
            if interrupted:
                os.kill(os.getpid(), signal.SIGINT)

    line.on_poll = on_poll
    return line


def test_one_that_is_killed_again_and_again_is_started_so_often(history, joined, job):
    code, said = joined(dying(history, joined, times=99))
    again = "rollout-x ended: killed by signal 9; rollout-x is started again"
    assert said[1:] == [again] * 3 + ["rollout-x ended: killed by signal 9; it is not started again"]
    assert code == 1
    (launcher,) = joined.launchers
    assert len(launcher.started) == 1 + job.recipe.launch.restarts
    assert len({spec.arguments for spec in launcher.started}) == len(launcher.started)


def test_one_that_nobody_wants_any_more_is_not_started_again(history, joined):
    code, said = joined(dying(history, joined, times=99, interrupted=True))
    assert code == 130
    assert said[1:] == ["rollout-x: stopped before it had joined"]


@pytest.mark.parametrize("ended", [-9, REFUSED])
def test_one_whose_key_was_revoked_is_not_started_again(history, joined, job, ended):
    key_folder.ensure(job.keys)
    allow_list.revoke(job.keys, "rollout")
    code, said = joined(dying(history, joined, times=1, code=ended))
    assert code == 1
    assert "its key rollout was revoked" in said[1]
    assert said[1].endswith("; it is not started again")
