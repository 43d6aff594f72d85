"""Those who speak to the sockets of a run as nobody should; each says how it was answered, and how often."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket as network
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from cosmos_core.transport.codec import Codec
from cosmos_core.transport.keys import Key, KeyPair
from cosmos_core.transport.sockets import CONTROL, Curve, Socket, dealer, offer, stop_monitor
from tests.malformed_requests import is_beyond_aiohttp
from tests.nightly.fuzz.frames import Malformed

Place: TypeAlias = tuple[str, int]
Answers: TypeAlias = "Counter[str]"

SILENCE = "no answer"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
PER_CONNECTION = 20
_AT_ONCE = 16
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_PATIENCE_S = 240.0
"""How long somebody who may speak waits on a busy machine."""


def requests(place: Place, data: Iterable[bytes], *, timeout_s: float = 0.3) -> Answers:
    """Say each of these on a connection of its own, and hang up once it is answered, or has not been for a while."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return Counter(pool.map(lambda each: _request(place, each, timeout_s), data))


def _request(place: Place, data: bytes, timeout_s: float) -> str:
    answer = b""
    with network.create_connection(place, timeout=_PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(timeout_s)
            while len(answer) < len(GREETING) and (more := connection.recv(4096)):
                answer += more
        except TimeoutError:
            return SILENCE
        except ConnectionError:
            pass
    if answer.startswith(b"HTTP/"):
        status = answer[9:12].decode()
        return "500 of aiohttp" if status == "500" and is_beyond_aiohttp(data) else status
    return "greeted" if len(answer) > len(GREETING) else "hung up on"


def knocks(seed: int, count: int) -> Iterable[bytes]:
    """Beginnings of a conversation of ZeroMQ: noise, half a greeting, one without keys, a wrong handshake."""
    source = Malformed(seed, [b"x"], ["x"]).random
    curve = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    for _ in range(count):
        yield source.choice((
            source.randbytes(source.randint(1, 200)),
            GREETING[: source.randint(1, 12)],
            GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x26\x05READY" + source.randbytes(40),
            curve + b"\x04\xc8\x05HELLO" + source.randbytes(194),
            curve + b"\x06" + b"\x7f" * 8 + source.randbytes(64),
        ))  # fmt: skip


def strangers(address: str, keys: Sequence[tuple[str, Curve]], messages: Malformed, count: int) -> Answers:
    """Speak with each of these keys in turn, `PER_CONNECTION` messages at a time."""
    found: Answers = Counter()
    source = iter(messages)
    with zmq.Context() as context:
        for index in range(count // PER_CONNECTION):
            name, curve = keys[index % len(keys)]
            events = _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED
            identity = os.urandom(4).hex().encode()
            socket = dealer(context, address, identity, CONTROL, queued=True, curve=curve, events=events)
            monitor = socket.get_monitor_socket()
            for parts in itertools.islice(source, PER_CONNECTION):
                offer(socket, parts)
            event = recv_monitor_message(monitor)["event"] if monitor.poll(30_000) else 0
            found[f"{name}: {'refused' if event & _REFUSED else 'let in' if event else SILENCE}"] += PER_CONNECTION
            stop_monitor(socket)
            socket.close(linger=0)
    return found


def without_right(key: Key, server: str) -> Sequence[tuple[str, Curve]]:
    """A key that nobody knows, and a known one for another server than the one that is there."""
    return (
        ("unknown key", Curve(own=KeyPair.new(), server=server)),
        ("other server's key", Curve(own=key.pair, server=KeyPair.new().public)),
    )


def peer(
    address: str,
    curve: Curve,
    codec: Codec[Any],
    messages: Iterable[list[bytes]],
    *,
    last: bytes,
    is_last: Callable[[Any], bool],
) -> Answers:
    """Speak as somebody who was let in, until the answer to `last` shows that all was heard."""
    found: Answers = Counter()
    count = 0
    with zmq.Context() as context:
        socket = dealer(context, address, os.urandom(4).hex().encode(), CONTROL, queued=True, curve=curve)
        try:
            for parts in messages:
                count += 1
                end = time.monotonic() + _PATIENCE_S
                while not offer(socket, parts):
                    assert time.monotonic() < end, f"{address} takes nothing any more"
                    _hear(socket, codec, found)
                    socket.poll(1000, zmq.POLLOUT | zmq.POLLIN)
                _hear(socket, codec, found)
            end, asked_at = time.monotonic() + _PATIENCE_S, 0.0
            while not any(map(is_last, _hear(socket, codec, found))):
                assert time.monotonic() < end, f"{address} does not answer any more"
                if time.monotonic() - asked_at > 2:
                    asked_at = time.monotonic()
                    offer(socket, [last])
                socket.poll(100)
        finally:
            socket.close(linger=0)
    found[SILENCE] = max(0, count - sum(found.values()))
    return found


def _hear(socket: Socket, codec: Codec[Any], found: Answers) -> list[Any]:
    heard = []
    while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        message = codec.decode(socket.recv_multipart(zmq.NOBLOCK)[0])
        found[type(message).__name__] += 1
        heard.append(message)
    return heard


class Slow:
    """Clients who begin and never end, or who ask and never read. A context manager, and a thread.

    Args:
        place: Where they connect.
        first: What they say at once; in turn.
        count: Their number.
        drip: What each says again and again, each second; those to whom nothing is left to say only stay.
    """

    def __init__(self, place: Place, first: Sequence[bytes], count: int, drip: bytes = b"") -> None:
        self.place = place
        self.drip = drip
        self._first = itertools.cycle(first)
        self._open = [self._new() for _ in range(count)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stay, daemon=True)
        self.num_opened = count
        self.num_cut = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for each in self._open:
            each.close()

    def wait_until_cut(self, within_s: float) -> int:
        """Stay until nobody of them is left; how many are, after so many seconds."""
        self._over.set()
        self._thread.join()
        end = time.monotonic() + within_s
        while self._open and time.monotonic() < end:
            self._tend(renews=False)
            time.sleep(0.5)
        return len(self._open)

    def _new(self) -> network.socket:
        found = network.socket()
        found.setsockopt(network.SOL_SOCKET, network.SO_RCVBUF, 2048)
        found.settimeout(20)
        found.connect(self.place)
        found.setblocking(False)
        with contextlib.suppress(OSError):
            found.send(next(self._first))
        return found

    def _stay(self) -> None:
        while not self._over.wait(1.0):
            self._tend(renews=True)

    def _tend(self, *, renews: bool) -> None:
        """Say a little more, and see who was cut off."""
        kept = []
        for each in self._open:
            if not self._is_cut(each):
                kept.append(each)
                continue
            each.close()
            self.num_cut += 1
            if renews:
                kept.append(self._new())
                self.num_opened += 1
        self._open = kept

    def _is_cut(self, connection: network.socket) -> bool:
        poller = select.poll()
        poller.register(connection, select.POLLRDHUP)  # and what is always told: hung up, reset
        if not poller.poll(0):
            with contextlib.suppress(OSError):
                connection.send(self.drip)
            return False
        return True
