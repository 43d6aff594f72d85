"""Malformed frames at servers that hold something: it stays as it was, and is still given to who asks rightly."""

from __future__ import annotations

import itertools

import torch
import zmq

from cosmos_core.transport import key_folder
from cosmos_core.transport.authentication import Keyring, reach
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.transport.key_folder import USUAL
from cosmos_core.transport.keys import read_key
from cosmos_core.transport.payloads import PayloadClient, PayloadServer
from cosmos_core.transport.sockets import BULK, Socket, offer
from cosmos_core.types import Array, Payload
from cosmos_core.weights import wire
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from tests.nightly.fuzz.frames import Malformed, of_payloads, of_weights


def keyrings(tmp_path) -> dict[str, Keyring]:
    key_folder.make(tmp_path / "keys", USUAL)
    keys = {label: read_key(tmp_path / "keys" / f"{label}.key") for label in ("policy", "rollout")}
    return {label: Keyring(tmp_path / "keys", key) for label, key in keys.items()}


def say_to(endpoint: str, keyring: Keyring, messages: Malformed, count: int) -> None:
    with zmq.Context() as context:
        attacker = reach(keyring, context, endpoint, b"attacker", BULK, queued=True)
        for parts in itertools.islice(messages, count):
            send(attacker, parts)
        attacker.close(linger=10_000)


def send(socket: Socket, parts: list[bytes]) -> None:
    while not offer(socket, parts):
        drain(socket)
        assert socket.poll(30_000, zmq.POLLOUT | zmq.POLLIN)
    drain(socket)


def drain(socket: Socket) -> None:
    while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        socket.recv_multipart(zmq.NOBLOCK)


def test_a_payload_server_among_malformed_frames(tmp_path):
    both = keyrings(tmp_path)
    with PayloadServer("127.0.0.1", both["rollout"]) as server, PayloadClient(both["policy"]) as client:
        server.put(5, [Payload(kind="k", arrays={"x": Array(dtype="uint8", shape=(3,), data=b"abc")})])
        endpoint, _, token = server.endpoint.rpartition("/")
        say_to(endpoint, both["policy"], Malformed(3, of_payloads(token), ["Fetch", "Found", "Absent"]), 5_000)
        assert bytes(client.fetch({server.endpoint: [5]}, 20.0)[5][0].arrays["x"].data) == b"abc"
        assert server.held == {5}


def test_a_weight_server_among_malformed_frames(tmp_path):
    both = keyrings(tmp_path)
    tensors = {"w": torch.arange(6.0).reshape(2, 3)}
    with (
        WeightPublisher("run", keyring=both["policy"], directory=tmp_path) as publisher,
        WeightReceiver("zmq", run_id="run", host="elsewhere", keyring=both["rollout"]) as receiver,
    ):
        published = publisher.publish(1, tensors, None)
        token = publisher._server._published[1].snapshot.token
        piece = wire.TensorSlice(name="w", start=(0, 0), shape=(2, 3))
        valid = of_weights("run", token, piece)
        messages = Malformed(4, valid, ["Read", "Describe", "Leave", "Slices"])
        say_to(publisher.endpoint, both["rollout"], messages, 5_000)
        layout = {0: [(piece, "float32")]}
        target = WeightTarget(version=1, digest=published.digest, sources=(publisher.endpoint,), hosts=("there",))
        with receiver.fetch(target, layout, 20.0) as fetch:
            arrived = {piece.name: tensor.clone() for _, piece, tensor in fetch}
        assert torch.equal(arrived["w"], tensors["w"])
        assert publisher.held == (1,)
        # Its thread has not ended of anything.
        assert publisher.publish(2, tensors, None).version == 2
