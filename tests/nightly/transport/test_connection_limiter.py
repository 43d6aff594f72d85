"""Floods of connections at a socket with keys: what strangers can make a process keep is bounded, and counted."""

import socket as network
import threading
import time

import pytest
import zmq

from cosmos_core.transport import key_folder, sockets
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.connection_limiter import ConnectionLimiter
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key, read_key
from cosmos_core.transport.sockets import CONTROL, Curve, address_of, dealer, offer, receive_marked

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


def test_who_says_nothing_is_ended_and_leaves_room(keys, monkeypatch, context):
    monkeypatch.setattr(sockets, "_HANDSHAKE_MS", 300)
    numbers = []

    class Telling(ConnectionLimiter):
        def _welcome(self, descriptor):
            super()._welcome(descriptor)
            numbers.append(self.num_strangers)

    monkeypatch.setattr(
        "cosmos_core.transport.authentication.ConnectionLimiter", lambda socket: Telling(socket, most=2)
    )
    own = controller_key(keys).pair
    with listen(context, "127.0.0.1", 0, CONTROL, own=own, allowed=AllowList(keys / ALLOWED)) as listener:
        place = ("127.0.0.1", int(address_of(listener.socket).rpartition(":")[2]))
        with network.create_connection(place, 20) as one, network.create_connection(place, 20) as other:
            assert is_cut_off(one)
            assert is_cut_off(other)
            wait_for(lambda: len(numbers) == 2 and not listener.limiter.num_strangers)
            assert 0 not in numbers, "each was a stranger"
            newcomer = Friend(keys, listener)
            newcomer.speak(30.0)
            newcomer.close()


def test_who_may_speak_gets_in_while_others_flood(keys, listener, knock):
    over, held = threading.Event(), []

    def flood():
        while not over.is_set():
            held.extend(knock(5))
            while len(held) > MOST // 2:
                held.pop(0).close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(3):
            newcomer = Friend(keys, listener)
            newcomer.speak(10.0)
            newcomer.close()
    finally:
        over.set()
        flooding.join()


CROWD = 1000


def test_a_crowd_of_those_who_may_speak_is_heard(keys, context):
    own, key = controller_key(keys).pair, read_key(keys / "rollout.key")
    heard, over = set(), threading.Event()

    def speak(address, clients):
        curve = Curve(own=key.pair, server=key.server)
        crowd = [dealer(clients, address, f"{number}".encode(), curve=curve) for number in range(CROWD)]
        while not over.wait(0.2):
            for member in crowd:
                offer(member, [b"hello"])
        for member in crowd:
            member.close()

    with (
        zmq.Context() as clients,
        listen(context, "127.0.0.1", 0, CONTROL, own=own, allowed=AllowList(keys / ALLOWED)) as listener,
    ):
        clients.set(zmq.MAX_SOCKETS, 4 * CROWD)
        speaking = threading.Thread(target=speak, args=(address_of(listener.socket), clients))
        speaking.start()
        end = time.monotonic() + 120
        while len(heard) < CROWD and time.monotonic() < end:
            if listener.socket.poll(100):
                first, _ = receive_marked(listener.socket, 2)
                assert listener.who(first) is not None
                heard.add(first.bytes)
        over.set()
        speaking.join()
        assert (len(heard), listener.num_refused) == (CROWD, 0)
