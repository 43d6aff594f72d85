"""Floods of connections at a socket with keys: what strangers can make a process keep is bounded, and counted."""

import resource
import socket as network
import time

import psutil
import pytest
import zmq

from cosmos_core.transport import connection_limiter, key_folder
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.connection_limiter import EVENTS, ConnectionLimiter, raised_limit
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, KeyPair, controller_key, read_key
from cosmos_core.transport.sockets import CONTROL, Curve, address_of, dealer, offer, receive_marked, router

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
MOST = 20


@pytest.fixture
def keys(tmp_path):
    key_folder.make(tmp_path / "keys", key_folder.USUAL)
    return tmp_path / "keys"


@pytest.fixture
def listener(context, keys, monkeypatch):
    monkeypatch.setattr(
        "cosmos_core.transport.authentication.ConnectionLimiter",
        lambda socket: ConnectionLimiter(socket, most=MOST),
    )
    own = controller_key(keys).pair
    with listen(context, "127.0.0.1", 0, CONTROL, own=own, allowed=AllowList(keys / ALLOWED)) as found:
        yield found


class Friend:
    """Somebody who may speak."""

    def __init__(self, keys, listener):
        self._context = zmq.Context()
        key = read_key(keys / "rollout.key")
        curve = Curve(own=key.pair, server=key.server)
        self._socket = dealer(self._context, address_of(listener.socket), b"friend", curve=curve)
        self._listener = listener

    def speak(self, timeout_s=5.0):
        """Say something until it is heard; the connection's file."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self._socket.poll(50, zmq.POLLOUT)
            offer(self._socket, [b"hello"])
            if self._listener.socket.poll(50):
                first, _ = receive_marked(self._listener.socket, 2)
                assert self._listener.who(first) is not None
                return int(first.get(zmq.SRCFD))
        raise AssertionError("was not heard")

    def close(self):
        self._socket.close()
        self._context.term()


@pytest.fixture
def friend(keys, listener):
    found = Friend(keys, listener)
    yield found
    found.close()


@pytest.fixture
def knock(listener):
    """Opens connections that send something, and stay."""
    place = listener.endpoint.removeprefix("tcp://").partition("#")[0].split(":")
    opened = []

    def knock(count, said=b""):
        for _ in range(count):
            opened.append(network.create_connection((place[0], int(place[1])), timeout=5))
            opened[-1].settimeout(5)
            opened[-1].sendall(said)
        return opened[-count:]

    yield knock
    for connection in opened:
        connection.close()


def is_cut_off(connection):
    """Whether the other end has closed it; one that stays is waited for as long as its timeout is."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def wait_for(holds, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("said", [b"", GREETING[:11], GREETING], ids=["silent", "half a greeting", "a greeting"])
def test_strangers_beyond_the_bound_are_cut_off_newest_first(listener, friend, knock, said):
    connection = friend.speak()
    before = psutil.Process().num_fds()
    strangers = knock(10 * MOST, said)
    wait_for(lambda: listener.num_refused >= 9 * MOST)
    assert listener.limiter.num_strangers <= MOST
    assert all(is_cut_off(stranger) for stranger in strangers[MOST:])
    for stranger in strangers[:MOST]:
        stranger.settimeout(0.01)
    assert not any(is_cut_off(stranger) for stranger in strangers[:MOST])
    wait_for(
        lambda: psutil.Process().num_fds() <= before + 10 * MOST + MOST + 2
    )  # the strangers' own are of this process
    assert friend.speak() == connection, "who has spoken keeps the connection"


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


def test_whoever_leaves_is_no_stranger_any_more(listener, knock):
    for stranger in knock(5):
        stranger.close()
    wait_for(lambda: listener.limiter.num_strangers == 0)
    assert listener.num_refused == 0


def test_closing_while_somebody_knocks(context):
    socket = router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS)
    limiter = ConnectionLimiter(socket)
    network.create_connection(("127.0.0.1", int(address_of(socket).rpartition(":")[2]))).close()
    limiter.close()
    limiter.close()
    assert not limiter._thread.is_alive()


def test_a_socket_that_is_closed_already_is_passed_over(context):
    socket = router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS)
    limiter = ConnectionLimiter(socket)
    socket.close()
    limiter.close()
    assert not limiter._thread.is_alive()


def test_it_goes_on_after_a_failure(listener, knock, monkeypatch, caplog):
    monkeypatch.setattr(connection_limiter, "_address_of", lambda descriptor: 1 // 0)
    knock(1)
    wait_for(lambda: "ZeroDivisionError" in caplog.text)
    monkeypatch.undo()
    knock(1)
    wait_for(lambda: listener.limiter.num_strangers == 1)


class Told:
    """A connection's file that may be of another by now."""

    def __init__(self, monkeypatch, socket):
        self.limiter, self.host = ConnectionLimiter(socket), "10.0.0.1"
        monkeypatch.setattr(connection_limiter, "_address_of", lambda descriptor: (self.host, 1234))


def test_a_number_that_is_anothers_by_now_is_not_taken_for_heard(context, monkeypatch):
    told = Told(monkeypatch, router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS))
    told.limiter._take(zmq.EVENT_ACCEPTED, 900)
    told.limiter.heard(900, "10.0.0.2")
    assert told.limiter.num_strangers == 1
    told.limiter.heard(900, "10.0.0.1")
    assert told.limiter.num_strangers == 0
    told.limiter.close()


def test_who_is_heard_before_it_is_told_of_is_no_stranger(context, monkeypatch):
    told = Told(monkeypatch, router(context, "127.0.0.1", 0, own=KeyPair.new(), events=EVENTS))
    told.limiter.heard(900, "10.0.0.1")
    told.limiter._take(zmq.EVENT_ACCEPTED, 900)
    assert told.limiter.num_strangers == 0
    told.limiter._take(zmq.EVENT_DISCONNECTED, 900)
    told.limiter._take(zmq.EVENT_ACCEPTED, 900)
    assert told.limiter.num_strangers == 1
    told.limiter.close()
