"""The server at its socket: keys that speak, keys that are revoked, and for whom these are looked up."""

from __future__ import annotations

import time

import attrs
import pytest
import zmq

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control import server
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import RunOpened
from cosmos_core.control.recovery_snapshots import RecoverySnapshots
from cosmos_core.control.server import Inbox
from cosmos_core.transport.keys import read_key
from cosmos_core.transport.messages import DOWN, UP, WIRE_VERSION, Directive, Hello, Refused, Welcome
from cosmos_core.transport.sockets import Curve, address_of, dealer, offer, receive
from cosmos_service_tools import allow_list
from tests.sockets import context, keys, listener

__all__ = ["context", "keys", "listener"]


@attrs.define
class Allowed:
    num_changes: int = 0


@attrs.define
class Authenticator:
    """Lets everybody in but `out`."""

    allowed: Allowed = attrs.field(factory=Allowed)
    out: str = ""

    def find(self, public):
        return None if public == self.out else public


@attrs.define
class Listener:
    authenticator: Authenticator = attrs.field(factory=Authenticator)
    num_refused: int = 0


class Known:
    """Identities that speak, and how often they were asked for."""

    def __init__(self, *identities):
        self.identities, self.num_asked = set(identities), 0

    def __call__(self):
        self.num_asked += 1
        return self.identities


@pytest.fixture
def stub():
    return Listener()


def test_nobody_is_asked_for_while_the_list_of_keys_stays_as_it_is(stub):
    known, inbox = Known(b"a", b"b"), Inbox(stub)
    inbox._keys.update({b"a": "A", b"b": "B"})
    assert [inbox.revoked(known) for _ in range(100)] == [[]] * 100
    assert known.num_asked == 0
    stub.authenticator.out, stub.authenticator.allowed.num_changes = "B", 1
    assert inbox.revoked(known) == [b"b"]
    assert inbox.revoked(known) == []


def test_those_who_spoke_once_are_forgotten_in_time(stub, monkeypatch):
    monkeypatch.setattr(server, "_SPARE_IDENTITIES", 5)
    known, inbox = Known(b"0", b"1"), Inbox(stub)
    for number in range(100):
        inbox._keys[b"%d" % number] = "A"
        inbox.revoked(known)
        assert len(inbox._keys) <= 10
    assert inbox._keys.keys() >= known.identities
    assert known.num_asked < 20


class Peer:
    """A process with the key of rollout replicas, at a server that serves it between what it says and hears."""

    def __init__(self, keys, listener, server):
        key = read_key(keys / "rollout.key")
        self.context, self.server = zmq.Context(), server
        self.socket = dealer(
            self.context, address_of(listener.socket), b"peer", curve=Curve(own=key.pair, server=key.server)
        )

    def say(self, message):
        end = time.monotonic() + 5
        while not offer(self.socket, [UP.encode(message)]):
            assert time.monotonic() < end

    def hear(self, kind):
        """The next message of a kind."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            self.server.turn()
            while self.socket.poll(20):
                (data,) = receive(self.socket, 1)
                if isinstance(message := DOWN.decode(data), kind):
                    return message
        raise AssertionError(f"no {kind.__name__}")


@pytest.fixture
def peer(keys, listener, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_core.transport.key_folder._LOOK_S", 0.0)
    state = core.begin(RunOpened(settings=settings()))
    snapshots = RecoverySnapshots(tmp_path / "recovery", keep=1)
    with Journal(tmp_path / "journal.sqlite") as journal:
        found = Peer(keys, listener, server.Server(state, journal, listener, ControlConfig(), snapshots))
        yield found
        found.socket.close(linger=0)
        found.context.term()


def test_a_key_is_heard_as_what_it_is_for_until_it_is_revoked(peer, keys, tmp_path):
    hello = Hello(
        wire=WIRE_VERSION,
        run_id="run",
        name="rollout-0",
        role="rollout",
        incarnation="one",
        host="host",
        pid=1,
        step=0,
        endpoints={"payloads": "p"},
    )
    peer.say(hello)
    assert peer.hear(Welcome).acknowledged == 0
    assert peer.hear(Directive).rollout is not None
    peer.say(attrs.evolve(hello, name="policy-0", role="policy"))
    refused = peer.hear(Refused)
    assert "rollout" in refused.reason
    assert refused.is_final
    assert peer.server._gauges()["controller"]["messages_refused"] == 1
    allow_list.revoke(keys, "rollout")
    assert peer.hear(Refused).reason == "its key was revoked"
    assert [name for name, _ in peer.server._loop.state.replicas.items()] == []
