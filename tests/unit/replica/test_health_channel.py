"""Real processes on one health channel: whatever becomes of one, all end promptly, and each knows the first cause."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.health_channel import (
    Connection,
    End,
    Failure,
    FollowerChannel,
    Goodbye,
    HealthChannel,
    Join,
    Ping,
    words_of,
)
from cosmos_core.replica.health_leader import LeaderChannel

MEMBER = """
import ctypes, os, sys, threading, time
from cosmos_core.errors import CosmosError, ProcessLostError, TrainingError
from cosmos_core.replica.health_channel import FollowerChannel
from cosmos_core.replica.health_leader import LeaderChannel
rank, size = int(sys.argv[1]), int(sys.argv[2])

def end(error):
    print("lost:" if isinstance(error, ProcessLostError) else "told:", error, flush=True)
    os._exit(1)

def stuck():
    ctypes.CDLL(None).pause()
    time.sleep(60)

if rank == 0:
    line = LeaderChannel(name="policy-0", size=size, token="t", host="127.0.0.1", end=end, patience_s=3.0)
    print(line.port, flush=True)
else:
    address = ("127.0.0.1", int(sys.argv[4]))
    line = FollowerChannel(name="policy-0", rank=rank, token="t", address=address, end=end, patience_s=3.0)
try:
    with line:
        if rank == 0:
            line.meet(20.0, lambda: False)
        print("joined", flush=True)
        sys.stdin.readline()
        exec(sys.argv[3])
    print("done", flush=True)
except CosmosError as error:
    print("raised lost:" if isinstance(error, ProcessLostError) else "raised:", error, flush=True)
    sys.exit(1)
"""

PATIENT = """
from cosmos_core.replica import health_channel, health_leader
health_leader._SETTLE_S, health_channel.ANSWER_S, health_channel._FAREWELL_S = 1.0, 10.0, 15.0
"""
"""What came first is found on a busy machine, too."""


@pytest.fixture
def world():
    """Start one process for each piece of code; all run theirs at the same time."""
    started = []

    def member(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    def start(*codes: str) -> list[subprocess.Popen[str]]:
        leader = member("0", str(len(codes)), codes[0])
        port = leader.stdout.readline().strip()
        members = [leader, *(member(str(rank), str(len(codes)), codes[rank], port) for rank in range(1, len(codes)))]
        for process in members:
            assert process.stdout.readline() == "joined\n"
        for process in members:
            process.stdin.write("\n")
            process.stdin.flush()
        return members

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outputs(members: list[subprocess.Popen[str]], within_s: float = 20.0) -> list[str]:
    deadline = time.monotonic() + within_s
    return [process.communicate(timeout=max(0.01, deadline - time.monotonic()))[0].strip() for process in members]


def wait_until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_quiet_life_ends_when_all_have_done_their_work(world):
    members = world("pass", "time.sleep(3)", "pass")
    time.sleep(0.3)
    assert [process.poll() for process in members] == [None] * 3
    assert outputs(members) == ["done"] * 3


def test_the_leader_stays_until_followers_have_closed():
    """What came in meanwhile and lay unread would reset the connection, and the goodbye with it."""
    with LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=print) as line:
        connection = Connection(socket.create_connection(("127.0.0.1", line.port)), 0)
        connection.send(Join(rank=1, token="t", pid=1))
        line.meet(20.0, lambda: False)
        connection.send(Goodbye())
        leaving = threading.Thread(target=line.goodbye)
        leaving.start()
        while Goodbye() not in (connection.receive() or ()):
            pass
        leaving.join(0.4)
        stays = leaving.is_alive()
        connection.send(Ping())
        connection.close()
        leaving.join(10)
    assert stays
    assert not leaving.is_alive()


def test_an_error_of_a_follower_ends_all_although_they_are_stuck(world):
    members = world("stuck()", "stuck()", "raise TrainingError('boom')")
    said = outputs(members)
    assert said == ["told: policy-0 rank 2: boom"] * 2 + ["raised: boom"]
    assert [process.returncode for process in members] == [1] * 3


def test_an_error_of_the_leader_ends_all(world):
    said = outputs(world("raise TrainingError('boom')", "stuck()", "stuck()"))
    assert said == ["raised: boom", "told: policy-0 rank 0: boom", "told: policy-0 rank 0: boom"]


def test_the_first_cause_is_told_and_not_its_echoes(world):
    """What breaks in the others' collectives is heard of at once; the error itself, later."""
    echo = PATIENT + "raise RuntimeError('Connection closed by peer')"
    said = outputs(world(echo, echo, PATIENT + "time.sleep(0.01); raise TrainingError('boom')"))
    assert said == ["raised: policy-0 rank 2: boom"] * 2 + ["raised: boom"]


@pytest.mark.parametrize("echo", [False, True])
def test_a_killed_follower(world, echo):
    code = PATIENT + "time.sleep(0.05); raise RuntimeError('Connection closed by peer')" if echo else "stuck()"
    members = world(code, "stuck()", "stuck()" if not echo else "os.kill(os.getpid(), 9)")
    if not echo:
        os.kill(members[2].pid, signal.SIGKILL)
    said = outputs(members)
    cause = f"policy-0 rank 2: its process (pid {members[2].pid}) ended without a word: killed, or out of memory?"
    assert said == [("raised lost: " if echo else "lost: ") + cause, f"lost: {cause}", ""]


def test_a_killed_leader(world):
    members = world("stuck()", "stuck()", "stuck()")
    os.kill(members[0].pid, signal.SIGKILL)
    assert outputs(members) == ["", *["lost: policy-0 rank 0: its process, the leader, is gone"] * 2]


def test_a_frozen_follower(world):
    members = world("stuck()", "stuck()", "stuck()")
    os.kill(members[2].pid, signal.SIGSTOP)
    cause = f"policy-0 rank 2: its process (pid {members[2].pid}) has been silent for 3 s (control.lost_after_s): "
    cause += "stopped, or its machine cannot be reached"
    assert outputs(members[:2], within_s=20.0) == [f"lost: {cause}"] * 2
    # Once it goes on, it finds out, too.
    os.kill(members[2].pid, signal.SIGCONT)
    assert outputs(members[2:], within_s=20.0) == [f"lost: {cause}"]


@pytest.mark.parametrize("after_s", [0.0, 1.2])
def test_a_frozen_leader(world, after_s):
    members = world("stuck()", "stuck()", "stuck()")
    time.sleep(after_s)  # it has heard its followers, and has been frozen hardly longer than they may be silent
    os.kill(members[0].pid, signal.SIGSTOP)
    cause = "policy-0 rank 0: its process, the leader, has been silent for 3 s (control.lost_after_s)"
    assert outputs(members[1:], within_s=20.0) == [f"lost: {cause}"] * 2
    os.kill(members[0].pid, signal.SIGCONT)
    (said,) = outputs(members[:1], within_s=20.0)
    assert "ended without a word" in said


def test_a_follower_that_did_not_run_calls_nobody_silent(monkeypatch):
    """As after it was stopped: what lies unread is not looked at before its own time is up."""
    receive, ended, stopped = Connection.receive, [], threading.Event()

    def held_up(connection):
        if connection.rank == 0 and not stopped.is_set():
            stopped.set()
            time.sleep(1.0)
            return []
        return receive(connection)

    monkeypatch.setattr(Connection, "receive", held_up)
    with LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=ended.append) as line:
        address = ("127.0.0.1", line.port)
        follower = FollowerChannel(
            name="policy-0", rank=1, token="t", address=address, end=ended.append, patience_s=0.5
        )
        line.meet(5.0, lambda: False)
        line.abandon(7)
        wait_until(lambda: follower.abandoned == 7 or ended, 10.0)
        threading.Thread(target=follower.goodbye).start()
    assert not ended


def test_a_follower_that_fails_after_the_leader_was_done_ends_all(world):
    members = world("pass", "time.sleep(0.2); raise TrainingError('late')")
    assert outputs(members) == ["told: policy-0 rank 1: late", "raised: late"]


def test_the_leader_says_who_did_not_appear():
    with LeaderChannel(name="policy-0", size=3, token="t", host="127.0.0.1", end=print) as line:
        joined = FollowerChannel(name="policy-0", rank=1, token="t", address=("127.0.0.1", line.port), end=print)
        told = []
        FollowerChannel(name="policy-0", rank=2, token="another", address=("127.0.0.1", line.port), end=told.append)
        wait_until(lambda: 1 in line._joined, 10.0)
        with pytest.raises(
            ReplicaError, match=r"ranks \[2\] of 3 did not appear within 0\.3 s; see logs/policy-0\.2\.log"
        ):
            line.meet(0.3, lambda: False)
        with pytest.raises(ReplicaError, match="told to stop"):
            line.meet(5.0, lambda: True)
        threading.Thread(target=joined.goodbye).start()
    assert [str(error) for error in told] == ["policy-0 rank 0: its process, the leader, is gone"]


def test_a_rank_that_is_taken_is_not_given_to_a_stranger(caplog):
    with LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=print) as line:
        follower = FollowerChannel(name="policy-0", rank=1, token="t", address=("127.0.0.1", line.port), end=print)
        line.meet(5.0, lambda: False)
        ended = threading.Event()
        FollowerChannel(
            name="policy-0", rank=1, token="t", address=("127.0.0.1", line.port), end=lambda _error: ended.set()
        )
        assert ended.wait(5.0)
        assert "a second process says that it is rank 1" in caplog.text
        line.abandon(7)
        wait_until(lambda: follower.abandoned == 7)
        threading.Thread(target=follower.goodbye).start()


def test_followers_learn_that_a_generation_was_abandoned():
    with LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=print) as line:
        follower = FollowerChannel(name="policy-0", rank=1, token="t", address=("127.0.0.1", line.port), end=print)
        line.meet(5.0, lambda: False)
        line.abandon(7)
        line.abandon(3)
        wait_until(lambda: follower.abandoned == 7)
        threading.Thread(target=follower.goodbye).start()


def test_a_leader_that_cannot_be_reached_or_cannot_listen():
    with pytest.raises(ReplicaError, match=r"its leader at 127\.0\.0\.1:1 cannot be reached"):
        FollowerChannel(name="policy-0", rank=1, token="t", address=("127.0.0.1", 1), end=print)
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        LeaderChannel(name="policy-0", size=2, token="t", host="192.0.2.1", end=print)


def test_a_stranger_cannot_fill_the_memory():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        connection = Connection(server.accept()[0])
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(TransportError, match="a message of 4,294,967,295 bytes; 4,096 are the most"):
            connection.receive()
        connection.rank = 1
        theirs.sendall(b"x")
        with pytest.raises(TransportError, match="a message of 4,294,967,295 bytes; 16,777,216 are the most"):
            connection.receive()
        connection.close()


BESIEGED = """
import resource, sys
from cosmos_core.replica import health_leader
from cosmos_core.replica.health_leader import LeaderChannel

health_leader._JOIN_S, health_leader._MOST_STRANGERS = float(sys.argv[1]), int(sys.argv[2])
ended = []
line = LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=ended.append)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(line.port, flush=True)
line.meet(20.0, lambda: False)
print("met", ended, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("join_s", "most"), [("0.2", "1000"), ("60", "8"), ("60", "1000")])
def test_strangers_who_say_nothing_do_not_keep_followers_out(join_s, most):
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", BESIEGED, join_s, most], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(leader.kill)
        address = ("127.0.0.1", int(leader.stdout.readline()))
        for _ in range(100):
            stack.enter_context(socket.create_connection(address))
        connection = Connection(socket.create_connection(address), 0)
        stack.callback(connection.close)
        connection.send(Join(rank=1, token="t", pid=1))
        assert leader.stdout.readline() == "met []\n"


def test_a_failure_of_one_who_has_not_joined_ends_nobody():
    ended = []
    with LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=ended.append) as line:
        connection = Connection(socket.create_connection(("127.0.0.1", line.port)), 0)
        connection.send(Failure(rank=-1, reason="I am a stranger", time=0.0, is_echo=False))
        connection.socket.settimeout(10)
        assert connection.receive() is None
        connection.close()
        follower = FollowerChannel(name="policy-0", rank=1, token="t", address=("127.0.0.1", line.port), end=print)
        line.meet(5.0, lambda: False)
        threading.Thread(target=follower.goodbye).start()
    assert not ended


def test_a_replica_of_one_process_has_nobody_to_lose():
    with pytest.raises(ValueError, match="own"), HealthChannel():
        raise ValueError("own")
    assert HealthChannel().fail(Failure(rank=0, reason="own", time=0.0, is_echo=False)) == End(reason="own")


def test_an_error_is_told_in_its_own_words_unless_it_only_wraps_another():
    def raised(error, cause):
        error.__cause__ = cause
        return error

    assert words_of(raised(RuntimeError("[Stage 1] failed to run forward"), OSError("no disk"))) == "OSError: no disk"
    assert words_of(raised(ValueError("the row has no answer"), KeyError("x"))) == "ValueError: the row has no answer"
    assert words_of(raised(ReplicaError("it is gone"), OSError("x"))) == "it is gone"
