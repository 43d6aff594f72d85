"""Floods of connections at a socket with keys: what strangers can make a process keep is bounded, and counted."""

import errno
import resource
import socket as network
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import psutil
import zmq

from cosmos_core.transport import connection_limiter
from cosmos_core.transport.connection_limiter import EVENTS, ConnectionLimiter, raised_limit
from cosmos_core.transport.keys import KeyPair
from cosmos_core.transport.sockets import address_of, offer, router
from tests.sockets import MOST, Friend, is_cut_off, wait_for

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def test_strangers_beyond_the_bound_are_cut_off_newest_first(listener, friend, knock, subtests):
    connection = friend.speak()
    for said in (b"", GREETING[:11], GREETING):
        with subtests.test(said=said):
            before, refused = psutil.Process().num_fds(), listener.num_refused
            strangers = knock(10 * MOST, said)
            # The strangers' own files are of this process, too.
            most = before + 10 * MOST + MOST + 2
            wait_for(lambda refused=refused: listener.num_refused >= refused + 9 * MOST)
            assert listener.limiter.num_strangers <= MOST
            assert all(is_cut_off(stranger) for stranger in strangers[MOST:])
            for stranger in strangers[:MOST]:
                stranger.settimeout(0.01)
            assert not any(is_cut_off(stranger) for stranger in strangers[:MOST])
            wait_for(lambda most=most: psutil.Process().num_fds() <= most)
            assert friend.speak() == connection, "who has spoken keeps the connection"
            for stranger in strangers:
                stranger.close()
            wait_for(lambda: listener.limiter.num_strangers == 0)


def test_the_bound_is_half_of_the_files_that_may_be_open(context):
    limiter = ConnectionLimiter(router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or soft >= min(hard, 65_536)
    assert limiter._most == max(256, soft // 2)
    limiter.close()


def test_more_files_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 20_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert raised_limit() == 20_000
    assert asked == [(20_000, 20_000)]


def test_closing_while_somebody_knocks_or_after_the_socket(context):
    for closes in (lambda socket: None, lambda socket: socket.close()):
        socket = router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS)
        limiter = ConnectionLimiter(socket)
        network.create_connection(("127.0.0.1", int(address_of(socket).rpartition(":")[2]))).close()
        closes(socket)
        limiter.close()
        limiter.close()
        assert not limiter._thread.is_alive()


def test_what_was_said_has_time_to_leave(listener, keys):
    friend = Friend(keys, listener, queued=True)
    friend.speak()
    # More than the buffers of a connection hold.
    said = bytes(32 << 20)
    with ThreadPoolExecutor() as pool:
        assert offer(listener.socket, [b"friend", said])
        heard = pool.submit(friend.hear, 5.0)
        listener.close(linger_ms=5000)
        assert len(heard.result()) == len(said)
    friend.close()


FLOODED = """
    import socket, threading, zmq
    from cosmos_core.transport.connection_limiter import EVENTS, ConnectionLimiter
    from cosmos_core.transport.keys import KeyPair
    from cosmos_core.transport.sockets import address_of, router, stop_monitor

    def flood(listener):
        address = "127.0.0.1", int(address_of(listener).rpartition(":")[2])
        # With their ends 2,100 events; libzmq queues 2,000, and then waits.
        for _ in range(1050):
            socket.create_connection(address, timeout=10).close()

    with zmq.Context() as context:
        reads = threading.Event()
        limiter = ConnectionLimiter(listener := router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS))
        limiter._take = lambda event, descriptor: reads.wait()
        flood(listener)
        threading.Timer(0.2, reads.set).start()
        limiter.close()
        with router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS) as listener:
            flood(listener)
            stop_monitor(listener)
    print("closed")
"""


def test_a_flood_keeps_no_socket_from_being_closed():
    # In a process of its own, since one that keeps Python's lock for ever could not be timed.
    command = [sys.executable, "-c", textwrap.dedent(FLOODED)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout == "closed\n"


def test_it_goes_on_after_a_failure(listener, knock, monkeypatch, caplog):
    monkeypatch.setattr(connection_limiter, "_address_of", lambda descriptor: 1 // 0)
    knock(1)
    wait_for(lambda: "ZeroDivisionError" in caplog.text)
    monkeypatch.undo()
    knock(1)
    wait_for(lambda: listener.limiter.num_strangers == 1)


def test_connections_that_cannot_be_accepted_are_told_of_ever_more_seldom(listener, caplog):
    for _ in range(4):
        listener.limiter._take(zmq.EVENT_ACCEPT_FAILED, errno.EMFILE)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"a connection could not be accepted: Too many open files ({n} so far)" for n in (1, 2, 4)]


def test_a_connections_file_may_be_of_another_by_now(context, monkeypatch):
    monkeypatch.setattr(connection_limiter, "_address_of", lambda descriptor: ("10.0.0.1", 1234))
    limiter = ConnectionLimiter(router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS))
    limiter._take(zmq.EVENT_ACCEPTED, 900)
    limiter.heard(900, "10.0.0.2")
    assert limiter.num_strangers == 1, "it was another one who was heard"
    limiter.heard(900, "10.0.0.1")
    assert limiter.num_strangers == 0
    # Who is heard before it is told of is no stranger, until it leaves.
    limiter.heard(901, "10.0.0.1")
    limiter._take(zmq.EVENT_ACCEPTED, 901)
    assert limiter.num_strangers == 0
    limiter._take(zmq.EVENT_DISCONNECTED, 901)
    limiter._take(zmq.EVENT_ACCEPTED, 901)
    assert limiter.num_strangers == 1
    limiter.close()


def test_who_is_cut_off_is_a_stranger_no_longer(context, monkeypatch):
    monkeypatch.setattr(connection_limiter, "_address_of", lambda descriptor: ("10.0.0.1", descriptor))
    limiter = ConnectionLimiter(router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS), most=1)
    for descriptor in (900, 901, 902):
        limiter._take(zmq.EVENT_ACCEPTED, descriptor)
    assert (limiter.num_strangers, limiter.num_refused) == (1, 2)
    limiter.close()
