from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from cosmos_core.errors import TransportError
from cosmos_core.transport import payload_client
from cosmos_core.transport.frames import REPLIES, REQUESTS, Absent, Fetch, Found, PayloadHeader, pack
from cosmos_core.transport.payloads import PayloadClient, PayloadServer
from cosmos_core.transport.sockets import address_of, dealer, offer, receive, router
from cosmos_core.types import Array, Payload


@pytest.fixture
def server():
    with PayloadServer("127.0.0.1") as server:
        yield server


@pytest.fixture
def client():
    with PayloadClient() as client:
        yield client


def tokens(value: int, size: int = 4) -> list[Payload]:
    return [Payload(kind="tokens", arrays={"x": Array(dtype="uint8", shape=(size,), data=bytes([value]) * size)})]


def values(fetched: dict[int, list[Payload]]) -> dict[int, int]:
    return {lease: payload.arrays["x"].data[0] for lease, (payload,) in fetched.items()}


def test_what_is_put_is_fetched_and_stays_until_released(server, client):
    for lease in (1, 2, 3):
        server.put(lease, tokens(lease))
    for _ in range(2):
        assert values(client.fetch({server.endpoint: [1, 3]}, 5)) == {1: 1, 3: 3}
    server.release_except([3])
    assert server.held == {3}
    assert server.held_bytes == 16
    assert values(client.fetch({server.endpoint: [1, 3]}, 5)) == {3: 3}
    server.put(3, tokens(9))
    assert values(client.fetch({server.endpoint: [3]}, 5)) == {3: 9}


def test_missing_leases_are_reported_at_once(server, client):
    server.put(1, tokens(1))
    assert client.fetch({}, 5) == client.fetch({server.endpoint: []}, 5) == {}
    began = time.monotonic()
    assert values(client.fetch({server.endpoint: [7, 1, 8]}, 30)) == {1: 1}
    assert time.monotonic() - began < 5


def test_a_large_array_is_a_read_only_view_of_a_frame(server, client):
    large = bytearray(random.Random(0).randbytes(1 << 20)) * 16
    array = Array(dtype="float32", shape=(4, 1 << 20), data=memoryview(large))
    server.put(1, [Payload(kind="anything", arrays={"x": array})])
    (payload,) = client.fetch({server.endpoint: [1]}, 30)[1]
    received = payload.arrays["x"]
    assert (payload.kind, received.shape) == ("anything", (4, 1 << 20))
    assert isinstance(received.data, memoryview)
    assert received.data.readonly
    client.close()
    assert received.data == memoryview(large)  # it owns the frame it lies in


def test_a_refusing_endpoint_is_given_up_early_and_others_are_served(server, client, caplog):
    server.put(1, tokens(1))
    gone = PayloadServer("127.0.0.1").start()
    gone.close()
    began = time.monotonic()
    assert values(client.fetch({gone.endpoint: [5], server.endpoint: [1]}, 30)) == {1: 1}
    assert time.monotonic() - began < 8
    assert "1 leases are missing" in caplog.text


def test_a_silent_endpoint_costs_its_timeout(client, context, caplog):
    silent = router(context, "127.0.0.1", 0)
    began = time.monotonic()
    assert client.fetch({f"{address_of(silent)}/token": [5]}, 0.3) == {}
    assert 0.3 <= time.monotonic() - began < 2


def test_an_endpoint_to_which_no_connection_comes_about_is_given_up(client, server, monkeypatch):
    monkeypatch.setattr(payload_client, "_ABSENT_S", 0.3)
    server.put(1, tokens(1))
    # Connections wait there for somebody who never speaks, as they do where nothing comes back.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        started = time.monotonic()
        fetched = client.fetch({f"tcp://127.0.0.1:{mute.getsockname()[1]}/token": [5], server.endpoint: [1]}, 60)
    assert values(fetched) == {1: 1}
    assert time.monotonic() - started < 20


def test_a_stranger_on_a_port_used_again_serves_nothing(server, client):
    server.put(1, tokens(1))
    address = server.endpoint.rpartition("/")[0]
    assert client.fetch({f"{address}/another": [1]}, 5) == {}


def test_an_endpoint_that_ends_during_a_fetch_costs_no_hang(client, context):
    ending = router(context, "127.0.0.1", 0)
    endpoint = f"{address_of(ending)}/token"

    def end() -> None:
        ending.poll(5000)
        ending.close()

    thread = threading.Thread(target=end)
    thread.start()
    began = time.monotonic()
    assert client.fetch({endpoint: [5]}, 30) == {}
    assert time.monotonic() - began < 10
    thread.join()


def test_a_request_lost_with_its_connection_is_asked_again(client, context):
    first = router(context, "127.0.0.1", 0)
    address = address_of(first)

    def restart() -> None:
        first.poll(5000)
        first.close()
        time.sleep(0.1)
        second = router(context, "127.0.0.1", int(address.rpartition(":")[2]))
        second.poll(5000)
        identity, data = receive(second, 2)
        reply_to(second, identity, REQUESTS.decode(data).request, 5)
        second.poll(1000)

    thread = threading.Thread(target=restart)
    thread.start()
    assert values(client.fetch({f"{address}/token": [5]}, 20)) == {5: 5}
    thread.join()


def test_a_late_reply_to_an_earlier_fetch_is_ignored(client, context):
    slow = router(context, "127.0.0.1", 0)
    endpoint = f"{address_of(slow)}/token"
    requests: list[tuple[bytes, Fetch]] = []

    def answer() -> None:
        for _ in range(2):
            slow.poll(5000)
            identity, data = receive(slow, 2)
            requests.append((identity, REQUESTS.decode(data)))
        identity, fetch = requests[1]
        reply_to(slow, identity, requests[0][1].request, 5, value=1)  # as if to the first fetch
        reply_to(slow, identity, fetch.request, 5, value=2)

    thread = threading.Thread(target=answer)
    thread.start()
    assert client.fetch({endpoint: [5]}, 0.3) == {}
    assert values(client.fetch({endpoint: [5]}, 5)) == {5: 2}
    thread.join()


def answer_with(socket, parts: list[bytes]) -> None:
    socket.poll(5000)
    offer(socket, [receive(socket, 2)[0], *parts])
    socket.poll(200)


def test_a_malformed_reply_is_an_error_that_names_the_endpoint(context, subtests):
    for parts in [
        [b"junk"],
        [REPLIES.encode(Found(request=1, lease=5, payloads=pack(tokens(1)).payloads))],
        [REPLIES.encode(Found(request=1, lease=5, payloads=pack(tokens(1)).payloads)), b"abc"],
        [REPLIES.encode(Absent(request=1, leases=())), *[b""] * 5000],
        [REQUESTS.encode(Fetch(token="t", request=1, leases=(5,)))],
    ]:
        with subtests.test(begins=parts[0][:20], parts=len(parts)):
            bad = router(context, "127.0.0.1", 0)
            endpoint = f"{address_of(bad)}/token"
            thread = threading.Thread(target=answer_with, args=(bad, parts))
            thread.start()
            with PayloadClient() as client, pytest.raises(TransportError, match=f"{endpoint} sent a malformed reply"):
                client.fetch({endpoint: [5]}, 5)
            thread.join()


def test_a_malformed_endpoint_is_refused(client, subtests):
    for endpoint in ["", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1/", "nonsense/token"]:
        with subtests.test(endpoint=endpoint), pytest.raises(TransportError, match="endpoint"):
            client.fetch({endpoint: [1]}, 1)


def test_malformed_requests_change_nothing_crash_nothing_and_flood_no_log(server, client, context, caplog):
    rng = random.Random(5)
    server.put(1, tokens(1))
    address, _, token = server.endpoint.rpartition("/")
    attacker = dealer(context, address, b"attacker", queued=True)
    good = REQUESTS.encode(Fetch(token=token, request=1, leases=(1, 2)))
    for _ in range(3000):
        mutant = bytearray(good)
        mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        while not offer(attacker, [bytes(mutant)] if rng.random() < 0.9 else [bytes(mutant)] * rng.randint(2, 9)):
            time.sleep(0.001)
        while attacker.poll(0):
            attacker.recv_multipart()
    offer(attacker, [bytes(5 << 20)])
    assert values(client.fetch({server.endpoint: [1]}, 10)) == {1: 1}
    assert server.held == {1}
    assert 0 < len([record for record in caplog.records if "ignored" in record.message]) < 20


def test_a_closed_server_takes_nothing(server):
    server.close()
    with pytest.raises(TransportError, match="not running"):
        server.put(1, tokens(1))


def reply_to(socket, identity: bytes, request: int, lease: int, value: int | None = None) -> None:
    packed = pack(tokens(lease if value is None else value))
    header: tuple[PayloadHeader, ...] = packed.payloads
    offer(socket, [identity, REPLIES.encode(Found(request=request, lease=lease, payloads=header)), *packed.frames])


def test_an_answer_that_nobody_waits_for_does_not_keep_a_fetch_busy(client, context, monkeypatch):
    eager, silent = router(context, "127.0.0.1", 0), router(context, "127.0.0.1", 0)
    looks = []
    receive_all = payload_client._Peer.receive
    monkeypatch.setattr(payload_client._Peer, "receive", lambda peer: looks.append(peer) or receive_all(peer))

    def answer_twice() -> None:
        eager.poll(5000)
        identity, data = receive(eager, 2)
        answer = REPLIES.encode(Absent(request=REQUESTS.decode(data).request, leases=(1,)))
        for _ in range(2):
            offer(eager, [identity, answer])

    thread = threading.Thread(target=answer_twice)
    thread.start()
    assert client.fetch({f"{address_of(eager)}/a": [1], f"{address_of(silent)}/b": [2]}, 0.5) == {}
    thread.join()
    assert len(looks) < 10


def test_an_endpoint_that_has_ended_is_forgotten_though_nothing_is_fetched_from_it(server, client):
    server.put(1, tokens(1, 200_000))
    with PayloadServer("127.0.0.1") as other:
        other.put(2, tokens(2, 200_000))
        assert values(client.fetch({server.endpoint: [1], other.endpoint: [2]}, 5)) == {1: 1, 2: 2}
        assert len(client._peers) == 2
        client.fetch({server.endpoint: [1]}, 5)
        assert len(client._peers) == 2
    end = time.monotonic() + 5
    while len(client._peers) > 1:
        assert time.monotonic() < end
        time.sleep(0.01)
        assert values(client.fetch({server.endpoint: [1]}, 5)) == {1: 1}
    assert list(client._peers) == [server.endpoint]


def test_what_became_of_each_connection_is_read_before_any_is_asked(server, client, monkeypatch):
    peer, order = payload_client._Peer, []
    ask, on_events = peer.ask, peer.on_events
    monkeypatch.setattr(peer, "ask", lambda *given: (order.append("ask"), ask(*given)))
    monkeypatch.setattr(peer, "on_events", lambda self: (order.append(self.endpoint), on_events(self)))
    server.put(1, tokens(1))
    with PayloadServer("127.0.0.1") as other:
        other.put(2, tokens(2))
        client.fetch({server.endpoint: [1], other.endpoint: [2]}, 5)
        order.clear()
        client.fetch({server.endpoint: [1]}, 5)
    assert {*order[: order.index("ask")]} == {server.endpoint, other.endpoint}
