"""Sockets of tests: a context that closes them; a socket with keys, somebody who may speak there, and strangers."""

from __future__ import annotations

import socket as network
import time

import pytest
import zmq

from cosmos_core.transport import key_folder
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.connection_limiter import ConnectionLimiter
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key, read_key
from cosmos_core.transport.sockets import CONTROL, Curve, address_of, dealer, offer, receive_marked

MOST = 20
"""Strangers that the listener of a test keeps."""


class KeepingContext:
    """A context that closes the sockets of a test, which pyzmq would warn about if they were collected open."""

    def __init__(self, context: zmq.Context) -> None:
        self._context = context
        self._kept: list[zmq.Socket] = []

    def socket(self, kind: int) -> zmq.Socket:
        self._kept.append(self._context.socket(kind))
        return self._kept[-1]

    def close(self) -> None:
        for socket in self._kept:
            socket.close(linger=0)


@pytest.fixture
def context():
    with zmq.Context() as context:
        keeping = KeepingContext(context)
        yield keeping
        keeping.close()


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
    """Somebody who may speak; one that is `queued` loses nothing that came before the connection broke."""

    def __init__(self, keys, listener, *, queued=False):
        self._context = zmq.Context()
        key = read_key(keys / "rollout.key")
        curve = Curve(own=key.pair, server=key.server)
        self._socket = dealer(self._context, address_of(listener.socket), b"friend", queued=queued, curve=curve)
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

    def hear(self, timeout_s):
        """The next message; nothing if none comes in time."""
        return self._socket.recv() if self._socket.poll(int(timeout_s * 1000)) else b""

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
