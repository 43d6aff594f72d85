"""Malformed frames at live sockets: nothing falls over, nothing leaks, nothing changes, and the others go on."""

from __future__ import annotations

import itertools
import os
import socket as network
import time
from pathlib import Path
from typing import get_args

import attrs
import pytest
import torch
import zmq

from cosmos_core.config.job import Job
from cosmos_core.control.machine import core
from cosmos_core.replica.client import ControlClient
from cosmos_core.run.observer import so_far
from cosmos_core.transport import key_folder
from cosmos_core.transport.authentication import Keyring, reach
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.transport.frames import REQUESTS, Fetch
from cosmos_core.transport.key_folder import USUAL
from cosmos_core.transport.keys import Key, person_key, read_key
from cosmos_core.transport.messages import (
    DOWN,
    UP,
    WIRE_VERSION,
    Beat,
    Command,
    Hello,
    Inquire,
    Refused,
    Reports,
    Up,
    Watch,
)
from cosmos_core.transport.payloads import PayloadClient, PayloadServer
from cosmos_core.transport.reports import CheckpointFailed
from cosmos_core.transport.sockets import BULK, CONTROL, Curve, Socket, dealer, offer
from cosmos_core.types import Array, Payload
from cosmos_core.weights import wire
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from tests.nightly.fuzz.frames import Malformed
from tests.nightly.integration.keyed import controller, make_job

RUN = "run-1"
TAMPERED = Hello(
    wire=WIRE_VERSION,
    run_id="run-of-others",
    name="rollout-9",
    role="rollout",
    incarnation="nobody",
    host="h",
    pid=1,
    step=0,
    endpoints={"payloads": "tcp://127.0.0.1:1/t"},
)
AS_REPLICA = (
    TAMPERED,
    attrs.evolve(TAMPERED, run_id=RUN, wire=WIRE_VERSION - 1, name="policy-0", role="policy"),
    Beat(name="rollout-0", incarnation="of before", term=0, revision=-0, gauges={"speed": 1.0}),
    Beat(name="policy-0", incarnation="nobody", term=1, revision=3, gauges={}),
    Reports(
        name="rollout-0", incarnation="of before", term=1, first=1, reports=(b"\x92\xa6Failed\x81\xa6reason\xa1x",)
    ),
    Reports(name="rollout-7", incarnation="nobody", term=9, first=7, reports=(b"", b"x")),
    Watch(run_id=RUN, after=0),
    Inquire(run_id=RUN),
    Command(run_id=RUN, ident="stop", request=b"\x92\xa4Stop\x80"),
)
AS_PERSON = (
    Watch(run_id="run-of-others", after=0),
    Watch(run_id=RUN, after=2**40),
    Inquire(run_id="run-of-others"),
    Inquire(run_id=RUN),
    Command(run_id="run-of-others", ident="stop", request=b"\x92\xa4Stop\x80"),
    Command(run_id=RUN, ident="c", request=b"\x92\xa5Drain\x81\xa4name\xa9rollout-5"),
    Command(run_id=RUN, ident="d", request=b"\x92\xa5Drain"),
    *AS_REPLICA[:4],
)


class Attacker:
    """A peer that was let in, and says whatever comes to its mind."""

    def __init__(self, address: str, key: Key, messages: Malformed) -> None:
        self.context = zmq.Context()
        curve = Curve(own=key.pair, server=key.server)
        self.socket = dealer(self.context, address, os.urandom(4).hex().encode(), CONTROL, queued=True, curve=curve)
        self.messages = iter(messages)

    def say(self, count: int) -> None:
        for parts in itertools.islice(self.messages, count):
            send(self.socket, parts)

    def wait_until_heard(self) -> None:
        """Until the controller has taken in all that was said."""
        mark = f"run-{os.urandom(4).hex()}"
        end, asked_at = time.monotonic() + 120, 0.0
        while time.monotonic() < end:
            if time.monotonic() - asked_at > 2:
                asked_at = time.monotonic()
                for last in (attrs.evolve(TAMPERED, run_id=mark), Watch(run_id=mark, after=0)):
                    send(self.socket, [UP.encode(last)])
            if self.socket.poll(100):
                message = DOWN.decode(self.socket.recv_multipart()[0])
                if isinstance(message, Refused) and mark in message.reason:
                    return
        raise AssertionError("the controller does not answer any more")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def send(socket: Socket, parts: list[bytes]) -> None:
    while not offer(socket, parts):
        drain(socket)
        assert socket.poll(30_000, zmq.POLLOUT | zmq.POLLIN)
    drain(socket)


def drain(socket: Socket) -> None:
    while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        socket.recv_multipart(zmq.NOBLOCK)


def knock(address: str, count: int, seed: int) -> None:
    """Connections that never come to speak: noise, half a greeting, a greeting without keys, a wrong handshake."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    source = Malformed(seed, [b"x"], ["x"]).random
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    for _ in range(count):
        words = source.choice(
            (
                source.randbytes(source.randint(1, 200)),
                greeting[: source.randint(1, 12)],
                greeting + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x26\x05READY" + source.randbytes(40),
                greeting + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + source.randbytes(194),
                greeting + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\x7f" * 8 + source.randbytes(64),
            )
        )
        with network.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(words)


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@pytest.fixture
def fuzzed(tmp_path):
    """A job, its controller's process and address, and a replica that is in the run."""
    job = make_job(tmp_path / "run")
    hello = attrs.evolve(TAMPERED, run_id=RUN, name="rollout-0", incarnation="good", pid=os.getpid())
    with (
        controller(job) as (process, address),
        ControlClient(address, hello, 0.3, key=read_key(job.keys / "rollout-0.key")) as replica,
    ):
        yield job, process, address, replica


def state_of(job: Job, address: str):
    return core.fold(event for _, _, event in so_far(address, RUN, person_key(job.keys)))


def fuzz_controller(fuzzed, count: int, seed: int) -> str:
    job, process, address, replica = fuzzed
    names = [cls.__name__ for cls in get_args(Up)]
    as_replica = Malformed(seed, [UP.encode(each) for each in AS_REPLICA], names)
    as_person = Malformed(seed + 1, [UP.encode(each) for each in AS_PERSON], names)
    while "rollout-0" not in (before := state_of(job, address)).replicas:
        time.sleep(0.05)
    knock(address, 100, seed)
    began = time.monotonic()
    attackers = [
        Attacker(address, read_key(job.keys / "rollout.key"), as_replica),
        Attacker(address, read_key(job.keys / "operator.key"), as_person),
    ]
    for attacker in attackers:
        attacker.say(2_000)
        attacker.wait_until_heard()
    memory, files = rss_bytes(process.pid), num_files(process.pid)
    for _ in range(0, count, 1_000):
        attackers[0].say(800)
        attackers[1].say(200)
        assert process.poll() is None
        replica.check()
    knock(address, count // 500, seed)
    for attacker in attackers:
        attacker.wait_until_heard()
    spent_s = time.monotonic() - began
    grown = rss_bytes(process.pid) - memory
    end = time.monotonic() + 30  # connections that never came to speak are given up after 10 s
    while num_files(process.pid) > files and time.monotonic() < end:
        time.sleep(0.1)
    assert num_files(process.pid) <= files
    for attacker in attackers:
        attacker.close()
    after = state_of(job, address)
    assert after == before
    assert not after.fenced
    # The replica was there all the time, and is still heard.
    replica.check()
    replica.report(CheckpointFailed(step=0, reason="disk full"))
    assert replica.flush(10.0)
    log = (job.logs / "controller.jsonl").stat().st_size
    assert log < 1 << 20
    assert grown < 24 << 20
    return f"{count:,} frames in {spent_s:.1f} s, memory {grown / 2**20:+.1f} MiB, {files} files, log {log:,} bytes"


@pytest.mark.timeout(180)
def test_a_controller_among_malformed_frames(fuzzed):
    print(fuzz_controller(fuzzed, 20_000, seed=1))


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_a_controller_among_a_million_malformed_frames(fuzzed):
    print(fuzz_controller(fuzzed, 1_000_000, seed=2))


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


def test_a_payload_server_among_malformed_frames(tmp_path):
    both = keyrings(tmp_path)
    valid = [
        Fetch(token="of others", request=1, leases=(1, 2)),
        Fetch(token="", request=-1, leases=tuple(range(-5, 300))),
    ]
    with PayloadServer("127.0.0.1", both["rollout"]) as server, PayloadClient(both["policy"]) as client:
        server.put(5, [Payload(kind="k", arrays={"x": Array(dtype="uint8", shape=(3,), data=b"abc")})])
        endpoint, _, token = server.endpoint.rpartition("/")
        valid.append(Fetch(token=token, request=3, leases=(5, 6, 2**60)))
        messages = Malformed(3, [REQUESTS.encode(each) for each in valid], ["Fetch", "Found", "Absent"])
        say_to(endpoint, both["policy"], messages, 5_000)
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
        strange = [
            attrs.evolve(piece, start=(-1, 5)),
            attrs.evolve(piece, shape=(2**40, 2**40)),
            attrs.evolve(piece, shape=(-2, 3)),
            attrs.evolve(piece, start=(0,), shape=(2,)),
            attrs.evolve(piece, start=(), shape=()),
            attrs.evolve(piece, name="v"),
        ]
        valid = [
            wire.Describe(request=1, run_id="run", version=1),
            wire.Describe(request=-1, run_id="of others", version=-1),
            wire.Read(request=2, token=token, pieces=(piece,), base=wire.Origin(version=1, digest="x")),
            *(wire.Read(request=3, token=token, pieces=(piece, each)) for each in strange),
            wire.Open(request=4, run_id="of others", backend="gloo"),
            wire.Leave(request=5),
            wire.Gone(request=6, held=(1,)),
        ]
        messages = Malformed(4, [wire.CODEC.encode(each) for each in valid], ["Read", "Describe", "Leave", "Slices"])
        say_to(publisher.endpoint, both["rollout"], messages, 5_000)
        layout = {0: [(piece, "float32")]}
        target = WeightTarget(version=1, digest=published.digest, sources=(publisher.endpoint,), hosts=("there",))
        with receiver.fetch(target, layout, 20.0) as fetch:
            arrived = {piece.name: tensor.clone() for _, piece, tensor in fetch}
        assert torch.equal(arrived["w"], tensors["w"])
        assert publisher.held == (1,)
        # Its thread has not ended of anything.
        assert publisher.publish(2, tensors, None).version == 2
