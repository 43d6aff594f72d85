"""A replica that joins a run: how it ends, at a controller that tells what a test says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.replica.host import host_id
from cosmos_core.run import joining
from cosmos_core.run.joining import Joining, find_run, join
from cosmos_core.run.roster import address_file

ADDRESS = "tcp://127.0.0.1:1"


class Line:
    """An observer whose controller is heard for some polls, and then no more."""

    num_gauges = 1

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
        self.started, self.is_stopped = [], False

    def start(self, spec):
        self.started.append(spec)

    def exits(self):
        return []

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

    def joined(line, name="rollout-x"):
        launchers, said = [], []
        monkeypatch.setattr(joining, "person_key", lambda keys, **_: None)
        monkeypatch.setattr(joining, "Observer", lambda *_: line)
        monkeypatch.setattr(joining, "LocalLauncher", lambda logs: launchers.append(Launcher(logs)) or launchers[0])
        code = join(Joining(job=job, address=ADDRESS, role="rollout", name=name), said.append)
        assert line.is_closed
        assert launchers[0].is_stopped
        return code, said

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
    monkeypatch.setattr(joining, "_SHOW_S", 0.0)
    history.join()
    name = next(name for name in history.state.replicas if name.startswith("rollout"))
    line = Line(history, heard=10)
    line.on_poll = lambda: announce("tcp://127.0.0.1:2") if line.heard == -10 else None
    # The replica of this name is the one that joined.
    monkeypatch.setattr(joining._Session, "check", lambda session: None)
    _, said = joined(line, name)
    told = [index for index, words in enumerate(said) if ": step " in words]
    silent = next(index for index, words in enumerate(said) if "has said nothing" in words)
    assert told
    assert max(told) < silent


def test_a_folder_that_cannot_be_read_keeps_nobody_from_another_run(tmp_path, monkeypatch):
    def told(directory: Path) -> str:
        if directory.name == "broken":
            raise ConfigError("job.json: damaged")
        return ADDRESS

    monkeypatch.setattr(joining, "_told_address", told)
    for name in ("broken", "fine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "controller.json").touch()
    assert find_run(ADDRESS, None, tmp_path) == (tmp_path / "fine", ADDRESS)
    with pytest.raises(ConfigError, match=r"no run in .* has that address; .*passed over: .*broken \(job\.json"):
        find_run("tcp://127.0.0.1:9", None, tmp_path)
