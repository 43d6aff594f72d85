"""Real processes on one health channel: whatever becomes of one, all end promptly, and each knows the first cause."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import attrs
import pytest

from cosmos_core.devices import HOW_IT_FAILED
from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica import health_channel, health_leader
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
from tests.health_worlds import besiege, outputs


def wait_until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_an_error_of_one_ends_all_although_they_are_stuck(world):
    members = world("stuck()", "stuck()", "raise TrainingError('boom')")
    said = outputs(members)
    assert said == ["told: policy-0 rank 2: boom"] * 2 + ["raised: boom"]
    assert [process.returncode for process in members] == [1] * 3
    said = outputs(world("raise TrainingError('boom')", "stuck()"))
    assert said == ["raised: boom", "told: policy-0 rank 0: boom"]


def test_a_gpu_that_fails_is_no_echo_and_no_error_of_the_run(world):
    failed = "raise RuntimeError('CUDA error: unspecified launch failure')"
    members = world("stuck()", failed, "raise RuntimeError('Connection closed by peer')")
    cause = f"policy-0 rank 1: RuntimeError: CUDA error: unspecified launch failure; {HOW_IT_FAILED}"
    assert outputs(members) == [f"lost: {cause}", "", f"raised lost: {cause}"]


def test_a_killed_follower_or_leader(world):
    members = world("stuck()", "stuck()", "stuck()")
    os.kill(members[2].pid, signal.SIGKILL)
    cause = f"policy-0 rank 2: its process (pid {members[2].pid}) ended without a word: killed, or out of memory?"
    assert outputs(members) == [f"lost: {cause}", f"lost: {cause}", ""]
    members = world("stuck()", "stuck()")
    os.kill(members[0].pid, signal.SIGKILL)
    assert outputs(members) == ["", "lost: policy-0 rank 0: its process, the leader, is gone"]


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


def test_an_echo_ends_by_what_it_is_the_echo_of_even_if_something_waits(monkeypatch):
    leaving = []
    monkeypatch.setattr(HealthChannel, "_leave", lambda channel: leaving.append(channel.rank))
    monkeypatch.setattr(health_channel, "_FAREWELL_S", 0.05)
    monkeypatch.setattr(health_leader, "_LINGER_S", 0.1)
    echo, boom = Failure(rank=1, reason="closed by peer", time=0.0, is_echo=True), "policy-0 rank 2: boom"
    with socket.create_server(("127.0.0.1", 0)) as server:
        follower = FollowerChannel(name="policy-0", rank=1, token="t", address=server.getsockname(), end=print)
        leader = Connection(server.accept()[0], 1)
        wait_until(lambda: leader.receive() == [Join(rank=1, token="t", pid=os.getpid())])
        threading.Thread(target=lambda: leader.receive() == [echo] and leader.send(End(reason=boom))).start()
        assert follower.fail(echo) == End(reason=boom)
        leader.close()
    line = LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=print)
    connection = Connection(socket.create_connection(("127.0.0.1", line.port)), 0)
    connection.send(Join(rank=1, token="t", pid=1))
    line.meet(5.0, lambda: False)
    connection.send(Failure(rank=1, reason="boom", time=1.0, is_echo=False))
    assert line.fail(attrs.evolve(echo, rank=0)) == End(reason="policy-0 rank 1: boom")
    wait_until(lambda: {0, 1} <= set(leaving))  # in any order; a process of another test may leave meanwhile
    for each in (connection, line._joined[1], line._server):
        each.close()


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
    with pytest.raises(ReplicaError, match=r"its leader at 127\.0\.0\.1:1 cannot be reached"):
        FollowerChannel(name="policy-0", rank=1, token="t", address=("127.0.0.1", 1), end=print)
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        LeaderChannel(name="policy-0", size=2, token="t", host="192.0.2.1", end=print)


def test_strangers_change_nothing_and_followers_learn_what_was_abandoned(caplog):
    ended, refused = [], threading.Event()
    with LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=ended.append) as line:
        address = ("127.0.0.1", line.port)
        stranger = Connection(socket.create_connection(address), 0)
        stranger.send(Failure(rank=-1, reason="I am a stranger", time=0.0, is_echo=False))
        stranger.socket.settimeout(10)
        assert stranger.receive() is None
        stranger.close()
        with socket.create_connection(address, timeout=10) as flood:
            flood.sendall(b"\0\0\0\7\x92\xa4Ping\x80" * 500)
            with contextlib.suppress(ConnectionError):
                flood.recv(1)
        follower = FollowerChannel(name="policy-0", rank=1, token="t", address=address, end=print)
        line.meet(5.0, lambda: False)
        assert caplog.text.count("is not of this start of the run") <= 2
        FollowerChannel(name="policy-0", rank=1, token="t", address=address, end=lambda _error: refused.set())
        assert refused.wait(5.0)
        assert "a second process says that it is rank 1" in caplog.text
        line.abandon(7)
        line.abandon(3)
        wait_until(lambda: follower.abandoned == 7)
        threading.Thread(target=follower.goodbye).start()
    assert not ended


def test_strangers_who_say_nothing_do_not_keep_followers_out():
    for join_s, most in (("0.2", "1000"), ("60", "8")):
        assert besiege(join_s, most) == "met []\n", (join_s, most)


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


def test_an_error_is_told_in_its_own_words_unless_it_only_wraps_another():
    # A replica of one process has nobody to lose.
    with pytest.raises(ValueError, match="own"), HealthChannel():
        raise ValueError("own")
    assert HealthChannel().fail(Failure(rank=0, reason="own", time=0.0, is_echo=False)) == End(reason="own")

    def raised(error, cause):
        error.__cause__ = cause
        return error

    assert words_of(raised(RuntimeError("[Stage 1] failed to run forward"), OSError("no disk"))) == "OSError: no disk"
    assert words_of(raised(ValueError("the row has no answer"), KeyError("x"))) == "ValueError: the row has no answer"
    assert words_of(raised(ReplicaError("it is gone"), OSError("x"))) == "it is gone"
