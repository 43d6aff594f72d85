"""Who may not speak is refused, told why, and changes nothing: strangers, wrong keys, wrong names, revoked keys."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from cosmos_core.config.loading import save_job
from cosmos_core.control.machine import core
from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.client import ControlClient
from cosmos_core.run.observer import Observer, so_far
from cosmos_core.run.requests import ask
from cosmos_core.transport import key_folder
from cosmos_core.transport.keys import KeyPair, person_key, read_key
from cosmos_core.transport.messages import WIRE_VERSION, Drain, Hello, Stop
from cosmos_service_tools import allow_list
from tests.nightly.integration.keyed import controller, make_job

pytestmark = pytest.mark.timeout(120)

HELLO = Hello(
    wire=WIRE_VERSION,
    run_id="run-1",
    name="rollout-0",
    role="rollout",
    incarnation="first",
    host="h",
    pid=1,
    step=0,
    endpoints={},
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    job = make_job(tmp_path_factory.mktemp("keyed") / "run")
    with controller(job) as (process, address):
        yield job, address
        assert process.poll() is None


@pytest.fixture
def state(served):
    job, address = served
    return lambda: core.fold(event for _, _, event in so_far(address, "run-1", person_key(job.keys)))


def until_refused(wait: Callable[[], object], within_s: float = 10.0) -> str:
    """Wait again and again, until an error says why that is in vain."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            wait()
        except (ReplicaError, TransportError) as error:
            return str(error)
    return ""


def refused(address, hello, key) -> str:
    """What a replica is told that is not wanted."""
    with ControlClient(address, hello, 0.3, key=key) as client:
        return until_refused(lambda: client.wait_directive(0, 0.1))


def label(served, name):
    return read_key(served[0].keys / f"{name}.key")


def test_those_who_may_not_speak_are_refused_and_told(served, state):
    _, address = served
    rollout = label(served, "rollout")
    stranger = attrs.evolve(rollout, pair=KeyPair.new())
    elsewhere = attrs.evolve(rollout, server=KeyPair.new().public)
    as_policy = attrs.evolve(HELLO, name="policy-0", role="policy")
    before = state()
    assert "it refuses this process's key" in refused(address, HELLO, stranger)
    assert "another key than `server`" in refused(address, HELLO, elsewhere)
    plain = refused(address, HELLO, None)
    assert "hung up" in plain or "one side has keys and the other has none" in plain
    assert "may speak as rollout-*, not as 'policy-0'" in refused(address, as_policy, rollout)
    assert "is for policy replicas" in refused(address, attrs.evolve(HELLO, name="policy-0"), label(served, "policy"))
    assert "cannot speak as a replica" in refused(address, HELLO, label(served, "operator"))
    assert state() == before


def test_an_observer_watches_and_asks_for_nothing(served, state):
    _, address = served
    before = state()
    observer = Observer(address, "run-1", label(served, "wall"))
    end = time.monotonic() + 10
    try:
        while "x" not in observer.answers and time.monotonic() < end:
            observer.ask(Stop(), "x")
            observer.poll(0.1)
        assert "key wall is of role observer" in observer.answers["x"]
        while not observer.last_sequence and time.monotonic() < end:
            observer.poll(0.1)
        assert observer.last_sequence
    finally:
        observer.close()
    assert state() == before
    nosy = Observer(address, "run-1", label(served, "rollout"))
    try:
        assert "may not watch the run" in until_refused(lambda: nosy.poll(0.1))
    finally:
        nosy.close()


def test_a_revoked_replica_is_lost_at_once_and_cannot_come_back(served, state):
    job, address = served
    own = label(served, "rollout-0")
    with ControlClient(address, HELLO, 0.3, key=own) as client:
        while "rollout-0" not in state().replicas:
            client.check()
        revoke = [sys.executable, "-m", "cosmos_core.cli", "keys", "revoke", str(job.directory), "rollout-0"]
        subprocess.run(revoke, check=True, capture_output=True)
        revoked_at = time.monotonic()
        reason = until_refused(lambda: client.wait_directive(10**6, 0.1))
        assert "its key was revoked" in reason or "may not speak here" in reason
        assert time.monotonic() - revoked_at < 5
    found = state()
    assert "rollout-0" not in found.replicas
    assert found.fenced["first"] == "rollout-0: its key was revoked"
    again = attrs.evolve(HELLO, incarnation="second")
    assert "it refuses this process's key" in refused(address, again, own)
    allow_list.allow_again(job.keys, "rollout-0")
    time.sleep(0.5)
    with ControlClient(address, again, 0.3, key=own) as client:
        end = time.monotonic() + 10
        while "rollout-0" not in state().replicas:
            client.check()
            assert time.monotonic() < end


def test_a_process_says_within_seconds_that_its_key_is_wrong(served, tmp_path):
    job, address = served
    other = attrs.evolve(job, directory=tmp_path / "other")
    other.directory.mkdir()
    save_job(other)
    key_folder.ensure(other.keys)
    code = (
        "from cosmos_core.replica.process import run_role\n"
        "def main(args):\n"
        "    client = args.connect(endpoints={})\n"
        "    while True: client.wait_directive(0, 1)\n"
        "run_role('rollout', main)\n"
    )
    line = ["--run", str(other.directory), "--name", "rollout-5", "--controller", address]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 77
    assert "does the folder of keys (control.keys) belong to this run?" in done.stderr
    assert time.monotonic() - began < 30


def test_people_ask_with_their_key(served, tmp_path):
    job, _ = served
    with pytest.raises(ReplicaError, match=r"refused: .*rollout-99"):
        ask(job.directory, Drain(name="rollout-99"))
    secrets = {path: read_key(path).pair.secret for path in job.keys.glob("*.key")}
    for path in job.directory.rglob("*"):
        if path.is_file() and path not in secrets:
            data = path.read_bytes()
            assert not any(secret.encode() in data for secret in secrets.values()), path
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown = process.read_bytes() + (process.parent / "environ").read_bytes()
        except OSError:
            continue
        assert not any(secret.encode() in shown for secret in secrets.values()), process
    assert os.environ.keys().isdisjoint({"COSMOS_KEY", "COSMOS_SECRET"})
