"""Bounds the connections of strangers: of whoever was accepted and has said nothing yet that could be read.

libzmq accepts connections until the process has no files left, and reads what a handshake says up to the largest
message. Those who may speak do so within moments, so when there are too many strangers, or they send too much, whoever
has been one for longest, or sent most, is cut off; one who may speak connects again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as network
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from cosmos_core.transport.sockets import Socket

_LOG: Final = logging.getLogger(__name__)

EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
"""What the socket must monitor."""
MOST_STRANGERS: Final = 256
MOST_BYTES: Final = 64 << 20
"""That all strangers together may have sent."""
_POLL_MS: Final = 100
_WEIGH_S: Final = 0.1
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128
"""Of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


@attrs.define
class _Stranger:
    descriptor: int
    address: tuple[object, ...]


class Usher:
    """Follows who comes to a socket that listens, on a thread of its own, and cuts strangers off.

    Args:
        socket: Made with `EVENTS` (`sockets.router`); closed after this.
        most: Strangers at once.
        most_bytes: That they may have sent, all together.
    """

    def __init__(self, socket: Socket, most: int = MOST_STRANGERS, most_bytes: int = MOST_BYTES) -> None:
        self._socket: Final = socket
        self._most: Final = most
        self._most_bytes: Final = most_bytes
        self._monitor: Final[Socket] = socket.get_monitor_socket()
        # By the number of the connection's file, the oldest first.
        self._strangers: Final[dict[int, _Stranger]] = {}
        self._stop: Final = threading.Event()
        self._num_refused = 0
        self._num_failed = 0
        self._thread: Final = threading.Thread(target=self._serve, name="usher", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """Connections that were cut off, or could not be accepted."""
        return self._num_refused + self._num_failed

    @property
    def num_strangers(self) -> int:
        """Connections from which nothing was heard yet."""
        return len(self._strangers)

    def heard(self, descriptor: int) -> None:
        """Take a connection, by the number of its file, for that of somebody who may speak. From any thread."""
        self._strangers.pop(descriptor, None)

    def close(self) -> None:
        """Follow no more. Called by the socket's thread, before it closes the socket. Idempotent."""
        if not self._monitor.closed:
            self._socket.disable_monitor()  # else libzmq would wait for whoever reads what it tells
            self._stop.set()
            self._thread.join()
            self._monitor.close()

    def _serve(self) -> None:
        weighed_at = time.monotonic()
        while not self._stop.is_set():
            if self._monitor.poll(_POLL_MS):
                news = recv_monitor_message(self._monitor)
                self._take(news["event"], news["value"])
            if time.monotonic() - weighed_at >= _WEIGH_S:
                self._weigh()
                weighed_at = time.monotonic()

    def _take(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._strangers.pop(descriptor, None)
            if (address := _address_of(descriptor)) is not None:
                self._strangers[descriptor] = _Stranger(descriptor, address)
            while len(self._strangers) > self._most:
                self._cut_off(next(iter(self._strangers.values()), None), f"more than {self._most} at once")
        elif event == zmq.EVENT_DISCONNECTED:
            self._strangers.pop(descriptor, None)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            self._num_failed += 1
            if self._num_failed.bit_count() == 1:
                why = os.strerror(descriptor)
                _LOG.warning("a connection could not be accepted (%d so far): %s", self._num_failed, why)

    def _weigh(self) -> None:
        """Cut off those who sent most, until what is left is not too much."""
        sizes = [(_received(stranger), stranger) for stranger in list(self._strangers.values())]
        total = sum(size for size, _ in sizes)
        for size, stranger in sorted(sizes, key=lambda each: -each[0]):
            if total <= self._most_bytes:
                return
            total -= size
            self._cut_off(stranger, f"{total + size:,} bytes before a word that could be read")

    def _cut_off(self, stranger: _Stranger | None, reason: str) -> None:
        if stranger is None:  # it has been heard meanwhile
            return
        self._strangers.pop(stranger.descriptor, None)
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:  # ever less often: whoever knocks must not fill the log
            _LOG.warning("cut off a stranger at %s (%d so far): %s", stranger.address, self._num_refused, reason)
        with _opened(stranger.descriptor) as connection, contextlib.suppress(OSError):
            # libzmq may have closed it, and its number be another's by now.
            if connection is not None and connection.getpeername() == stranger.address:
                connection.shutdown(network.SHUT_RDWR)


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[network.socket | None]:
    """A socket by the number of its file, which stays open as long as it is used; None if that is no socket."""
    try:
        own = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        found = network.socket(fileno=own)
    except OSError:
        os.close(own)
        yield None
        return
    with found:
        yield found


def _address_of(descriptor: int) -> tuple[object, ...] | None:
    """Who is at the other end of a connection; None if it is over."""
    with _opened(descriptor) as connection, contextlib.suppress(OSError):
        return connection.getpeername() if connection is not None else None
    return None


def _received(stranger: _Stranger) -> int:
    """Bytes that came from a stranger; 0 where the system does not tell."""
    with _opened(stranger.descriptor) as connection, contextlib.suppress(OSError, AttributeError, struct.error):
        if connection is not None and connection.getpeername() == stranger.address:
            told = connection.getsockopt(network.IPPROTO_TCP, network.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
            return int(_RECEIVED.unpack_from(told, _RECEIVED_AT)[0])
    return 0
