"""Floods of connections at a socket with keys: what strangers can make a process keep is bounded, and counted."""

import socket as network
import threading
import time

import zmq

from cosmos_core.transport import sockets
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.connection_limiter import ConnectionLimiter
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key, read_key
from cosmos_core.transport.sockets import CONTROL, Curve, address_of, dealer, offer, receive_marked
from tests.sockets import MOST, Friend, is_cut_off, wait_for


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
