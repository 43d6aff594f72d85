from __future__ import annotations

import os
import socket as network

import attrs
import pytest
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.transport.addresses import is_own
from cosmos_core.transport.sockets import BULK, CONTROL, address_of, dealer, offer, receive, receive_marked, router


@pytest.mark.parametrize("bind", ["127.0.0.1", *(["::1"] if is_own("::1") else [])])
def test_a_router_and_a_dealer_exchange_messages(context, bind):
    server = router(context, bind, 0)
    client = dealer(context, address_of(server), b"replica/1")
    assert client.poll(2000, zmq.POLLOUT)
    assert offer(client, [b"hello"])
    assert server.poll(2000)
    assert receive(server, 2) == [b"replica/1", b"hello"]
    assert offer(server, [b"replica/1", b"welcome"])
    assert client.poll(2000)
    assert receive(client, 1) == [b"welcome"]
    with pytest.raises(zmq.Again):
        receive(client, 1)


def test_a_port_in_use_is_named_with_what_to_do(context):
    with network.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=rf"tcp://127.0.0.1:{port} .*port is in use; set control.port"):
            router(context, "127.0.0.1", port)


def test_an_address_that_cannot_be_listened_on_is_explained(context, subtests):
    for bind, port, message in [
        ("203.0.113.7", 0, "no such address; bind to one of its own"),
        ("not an address", 0, "no such address"),
        ("127.0.0.1", 65536, "a port is a number from 0 to 65535"),
        ("127.0.0.1", -1, "a port is a number from 0 to 65535"),
    ]:
        with subtests.test(bind=bind, port=port, message=message), pytest.raises(TransportError, match=message):
            router(context, bind, port)
    with pytest.raises(TransportError, match="must look like tcp://HOST:PORT"):
        dealer(context, "nowhere", b"x")


def test_a_wildcard_is_advertised_by_an_address_of_this_machine(context):
    address = address_of(router(context, "0.0.0.0", 0))
    assert address.startswith("tcp://")
    assert "0.0.0.0" not in address


def test_what_cannot_go_is_refused_without_waiting_not_lost_in_silence(context):
    assert not offer(router(context, "127.0.0.1", 0), [b"nobody", b"x"])
    # Nothing piles up for a peer that is away, unless it is queued, and then so much and no more.
    assert not offer(dealer(context, "tcp://127.0.0.1:1", b"x"), [b"x"])
    client = dealer(context, "tcp://127.0.0.1:1", b"x", attrs.evolve(CONTROL, queue=3), queued=True)
    assert [offer(client, [b"x"]) for _ in range(5)] == [True, True, True, False, False]


def test_a_flood_of_parts_is_dropped_and_the_next_message_arrives(context):
    server = router(context, "127.0.0.1", 0)
    client = dealer(context, address_of(server), b"x", queued=True)
    offer(client, [b"part"] * 10_000)
    offer(client, [b"fine"])
    assert server.poll(2000)
    with pytest.raises(TransportError, match="more than 2 parts"):
        receive(server, 2)
    assert server.poll(2000)
    assert receive(server, 2) == [b"x", b"fine"]
    offer(client, [b"one", b"too many"])
    offer(client, [b"fine"])
    assert server.poll(2000)
    with pytest.raises(TransportError, match="more than 1 parts"):
        receive_marked(server, 2)
    assert server.poll(2000)
    first, rest = receive_marked(server, 2)
    assert (first.bytes, rest) == (b"x", [b"fine"])


def test_an_oversized_part_cuts_the_sender_off_and_nobody_else(context):
    server = router(context, "127.0.0.1", 0, attrs.evolve(CONTROL, part_bytes=1000))
    bad = dealer(context, address_of(server), b"bad", queued=True)
    good = dealer(context, address_of(server), b"good", queued=True)
    offer(bad, [bytes(1001)])
    offer(good, [bytes(1000)])
    assert server.poll(2000)
    assert receive(server, 2) == [b"good", bytes(1000)]
    assert not server.poll(200)


def test_a_restarted_peer_takes_its_old_identity_over(context):
    server = router(context, "127.0.0.1", 0)
    for message in (b"first", b"second"):
        # The first connection stays open, as that of a process on a host that lost its power does.
        offer(dealer(context, address_of(server), b"same", queued=True), [message])
        assert server.poll(2000)
        assert receive(server, 2) == [b"same", message]


def test_every_option_is_set(context):
    server = router(context, "127.0.0.1", 0)
    client = dealer(context, address_of(server), b"x", BULK)
    for made, limits in ((server, CONTROL), (client, BULK)):
        assert made.getsockopt(zmq.LINGER) == 0
        assert made.getsockopt(zmq.MAXMSGSIZE) == limits.part_bytes
        assert made.getsockopt(zmq.SNDHWM) == made.getsockopt(zmq.RCVHWM) == limits.queue
        assert made.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
        assert made.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert made.getsockopt(zmq.TCP_MAXRT) == 0
    assert client.getsockopt(zmq.RECONNECT_IVL_MAX) == 1000


def test_the_kernel_asks_whether_an_idle_peer_is_there(context):
    server = router(context, "127.0.0.1", 0)
    client = dealer(context, address_of(server), b"x", queued=True)
    offer(client, [b"hello"])
    assert server.poll(2000)
    taken = network.socket(fileno=os.dup(server.recv(copy=False).get(zmq.SRCFD)))
    with taken:
        assert taken.getsockopt(network.SOL_SOCKET, network.SO_KEEPALIVE) == 1
        options = (network.TCP_KEEPIDLE, network.TCP_KEEPINTVL, network.TCP_KEEPCNT)
        assert [taken.getsockopt(network.IPPROTO_TCP, option) for option in options] == [5, 5, 4]
