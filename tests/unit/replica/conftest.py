from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key
from cosmos_core.transport.messages import DOWN, UP, Down, Hello
from cosmos_core.transport.sockets import CONTROL, address_of, offer, receive, router
from tests.health_worlds import world

__all__ = ["world"]


class Peer:
    """The controller's end of the wire, driven by the test."""

    def __init__(self, keys: Path | None = None) -> None:
        """Listen, without keys or with those of a folder."""
        self.context = zmq.Context()
        own = None if keys is None else controller_key(keys).pair
        allowed = None if keys is None else AllowList(keys / ALLOWED)
        self.listener = listen(self.context, "127.0.0.1", 0, CONTROL, own=own, allowed=allowed)
        self.socket = self.listener.socket
        self.address = address_of(self.socket)
        self.identity = b""

    def next(self, timeout_s: float = 3.0) -> Any:
        """The next message; None if there is none in time."""
        if not self.socket.poll(round(timeout_s * 1000)):
            return None
        self.identity, data = receive(self.socket, 2)
        return UP.decode(data)

    def expect(self, kind: type, timeout_s: float = 3.0) -> Any:
        """The next message of a kind; others are skipped."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            message = self.next(end - time.monotonic())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def send(self, message: Down) -> None:
        assert offer(self.socket, [self.identity, DOWN.encode(message)])

    def send_raw(self, *parts: bytes) -> None:
        end = time.monotonic() + 10
        while not offer(self.socket, [self.identity, *parts]):  # its queue is full
            assert time.monotonic() < end
            time.sleep(0.005)

    def restart(self) -> None:
        """Lose every connection and listen on the same port again."""
        self.socket.close()
        port = int(self.address.rpartition(":")[2])
        end = time.monotonic() + 3
        while True:
            try:
                self.socket = router(self.context, "127.0.0.1", port)
            except TransportError:  # libzmq closes on a thread of its own
                assert time.monotonic() < end
                time.sleep(0.01)
            else:
                return

    def close(self) -> None:
        self.listener.close()
        self.socket.close()
        self.context.term()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def make_peer():
    """Make a peer that asks for keys."""
    made = []

    def make(keys: Path) -> Peer:
        made.append(Peer(keys))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def hello():
    return Hello(
        wire=1,
        run_id="run",
        name="rollout-0",
        role="rollout",
        incarnation="first",
        host="here",
        pid=1,
        step=0,
        endpoints={},
    )
