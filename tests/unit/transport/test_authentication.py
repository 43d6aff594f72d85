"""Sockets with authentication: who gets in, who is told why not, and what becomes of a key that is revoked."""

import time

import pytest
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.transport import key_folder
from cosmos_core.transport.addresses import hexadecimal, host_of, split_key
from cosmos_core.transport.authentication import Authenticator, Keyring, listen, reach, serve
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, KeyPair, controller_key, read_key
from cosmos_core.transport.payloads import PayloadClient, PayloadServer
from cosmos_core.transport.sockets import (
    BULK,
    CONTROL,
    HANDSHAKE_EVENTS,
    Curve,
    Handshakes,
    address_of,
    dealer,
    offer,
    receive_marked,
    router,
)
from cosmos_core.types import Array, Payload
from cosmos_service_tools import allow_list


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_core.transport.key_folder._LOOK_S", 0.0)
    key_folder.make(tmp_path / "keys", key_folder.USUAL)
    return tmp_path / "keys"


@pytest.fixture
def listener(context, folder):
    own = controller_key(folder).pair
    with listen(context, "127.0.0.1", 0, CONTROL, own=own, allowed=AllowList(folder / ALLOWED)) as found:
        yield found


class Client:
    """A dealer with its handshakes, in a context of its own."""

    def __init__(self, address, curve):
        self.context = zmq.Context()
        self.socket = dealer(self.context, address, b"c", curve=curve, events=HANDSHAKE_EVENTS)
        self.handshakes = Handshakes(self.socket, address)

    def is_in(self, timeout_s=3.0):
        return bool(self.socket.poll(int(timeout_s * 1000), zmq.POLLOUT))

    def problem(self, timeout_s=6.0):
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                self.handshakes.check()
            except TransportError as error:
                return str(error)
            self.handshakes.monitor.poll(100)
        return ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handshakes.close()
        self.handshakes.close()
        self.socket.close()
        self.context.term()


def curve(folder, label, *, server=None):
    key = read_key(folder / f"{label}.key")
    return Curve(own=key.pair, server=server or key.server)


def test_a_key_of_the_list_is_let_in_and_known(folder, listener):
    with Client(address_of(listener.socket), curve(folder, "rollout")) as client:
        assert client.is_in()
        assert offer(client.socket, [b"hello"])
        assert listener.socket.poll(2000)
        frame, body = receive_marked(listener.socket, 2)
        assert body == [b"hello"]
        peer = listener.authenticator.who(frame)
        assert (peer.label, peer.role, peer.names) == ("rollout", "rollout", ("rollout-*",))
        client.handshakes.check()


def test_a_revoked_key_is_nobody_from_the_next_message_on_and_cannot_come_again(folder, listener):
    address = address_of(listener.socket)
    with Client(address, curve(folder, "rollout")) as client:
        assert client.is_in()
        allow_list.revoke(folder, "rollout")
        assert offer(client.socket, [b"still here"])
        assert listener.socket.poll(2000)
        frame, _ = receive_marked(listener.socket, 2)
        assert listener.authenticator.who(frame) is None
    with Client(address, curve(folder, "rollout")) as client:
        assert "not in its allow-list, or was revoked" in client.problem()
    assert listener.authenticator.num_refused == 1


def test_a_stranger_is_refused_and_told(folder, listener):
    stranger = Curve(own=KeyPair.new(), server=controller_key(folder).server)
    began = time.monotonic()
    with Client(address_of(listener.socket), stranger) as client:
        assert "it refuses this process's key" in client.problem()
    assert time.monotonic() - began < 3
    assert not listener.socket.poll(50)


def test_a_process_with_the_keys_of_another_run_says_so(folder, listener, monkeypatch):
    monkeypatch.setattr("cosmos_core.transport.sockets._PATIENCE_S", 0.3)
    wrong = curve(folder, "rollout", server=KeyPair.new().public)
    with Client(address_of(listener.socket), wrong) as client:
        assert not client.is_in(0.2)
        assert "another key than `server`" in client.problem(10.0)


def test_without_keys_nobody_gets_in_and_it_is_told(listener):
    with Client(address_of(listener.socket), None) as client:
        assert not client.is_in(0.2)
        problem = client.problem(10.0)
        assert "one side has keys and the other has none" in problem or "hung up" in problem
    assert not listener.socket.poll(50)


def test_keys_are_not_wasted_on_a_socket_that_has_none(context, folder):
    plain = router(context, "127.0.0.1", 0)
    with Client(address_of(plain), curve(folder, "rollout")) as client:
        assert "one side has keys and the other has none" in client.problem()
    plain.close()


def test_a_controller_that_is_stopped_is_waited_for(context, folder):
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as hung:
        address = f"tcp://127.0.0.1:{hung.getsockname()[1]}"
        with Client(address, curve(folder, "rollout")) as client:
            assert client.problem(1.0) == ""


def test_keys_without_an_authenticator_let_nobody_in(context, folder):
    bare = router(context, "127.0.0.1", 0, own=controller_key(folder).pair)
    with Client(address_of(bare), curve(folder, "rollout")) as client:
        assert not client.is_in(0.5)
    bare.close()


def test_an_authenticator_lets_in_only_some_roles(folder):
    with zmq.Context() as context:
        authenticator = Authenticator(context, AllowList(folder / ALLOWED), ("policy",))
        assert authenticator.find(read_key(folder / "policy.key").pair.public).label == "policy"
        assert authenticator.find(read_key(folder / "rollout.key").pair.public) is None
        authenticator.close()
        authenticator.close()


def test_endpoints_carry_the_key_of_who_serves(context, folder):
    keyring = Keyring(folder, read_key(folder / "rollout.key"))
    with serve(keyring, context, "127.0.0.1", BULK, ("policy",)) as one, zmq.Context() as other:
        address, public = split_key(one.endpoint)
        assert address == address_of(one.socket)
        assert one.endpoint == f"{address}#{hexadecimal(public)}"
        assert public not in {read_key(path).pair.public for path in folder.glob("*.key")}
        with serve(keyring, other, "127.0.0.1", BULK, ("policy",)) as two:
            assert split_key(two.endpoint)[1] != public
        with pytest.raises(TransportError, match="this process has none"):
            reach(None, context, one.endpoint, b"x", BULK)
    with pytest.raises(TransportError, match="it has no key"):
        reach(keyring, context, "tcp://127.0.0.1:1", b"x", BULK)
    for text in ("tcp://a:1#", "tcp://a:1#zz", f"tcp://a:1#{'0' * 63}"):
        with pytest.raises(TransportError, match="no public key"):
            split_key(text)
    assert host_of("tcp://[::1]:5#ab") == "::1"


def payload(*values):
    data = bytes(values)
    return Payload(kind="k", arrays={"x": Array(dtype="uint8", shape=(len(data),), data=data)})


def test_samples_are_given_to_policy_replicas_only(folder):
    rollout, policy = (Keyring(folder, read_key(folder / f"{label}.key")) for label in ("rollout", "policy"))
    with PayloadServer("127.0.0.1", rollout) as server:
        server.put(1, [payload(7)])
        with PayloadClient(policy) as client:
            assert bytes(client.fetch({server.endpoint: [1]}, 5.0)[1][0].arrays["x"].data) == b"\x07"
            allow_list.revoke(folder, "policy")
            assert client.fetch({server.endpoint: [1]}, 0.5) == {}
        began = time.monotonic()
        for keyring in (rollout, policy):
            with PayloadClient(keyring) as client:
                assert client.fetch({server.endpoint: [1]}, 20.0) == {}
        assert time.monotonic() - began < 5


def test_a_server_that_took_the_port_of_another_is_not_believed(folder):
    rollout, policy = (Keyring(folder, read_key(folder / f"{label}.key")) for label in ("rollout", "policy"))
    with PayloadServer("127.0.0.1", rollout) as server, PayloadServer("127.0.0.1", rollout) as other:
        other.put(1, [payload(9)])
        address, _, rest = other.endpoint.partition("#")
        forged = f"{address}#{server.endpoint.partition('#')[2].partition('/')[0]}/{rest.partition('/')[2]}"
        with PayloadClient(policy) as client:
            assert client.fetch({forged: [1]}, 5.0) == {}


def test_a_key_that_could_not_be_looked_up_keeps_no_other_out(listener, folder, monkeypatch, caplog):
    monkeypatch.setattr(listener.authenticator, "find", lambda public: 1 // 0)
    key = read_key(folder / "rollout.key")
    curve = Curve(own=key.pair, server=key.server)
    with Client(address_of(listener.socket), curve) as client:
        assert not client.is_in(0.5)
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    with Client(address_of(listener.socket), curve) as client:
        assert client.is_in()
