"""Bounds the connections of strangers: of whoever was accepted and has said nothing yet that could be read.

libzmq accepts connections until the process has no files left, and reads what a handshake says up to the largest
message. A crowd of replicas are strangers, too, until they were heard, so only what would use up the process's files
is too many: whoever comes then is cut off, and connects again, and those who are silent are ended by libzmq
(`HANDSHAKE_IVL`). If strangers send too much, whoever sent most is cut off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
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
_FEWEST: Final = 256
_FILES: Final = 65_536
"""That are asked for: each connection takes some 15 KB of memory besides."""
MOST_BYTES: Final = 64 << 20
"""That all strangers together may have sent."""
_POLL_MS: Final = 100
_WEIGH_S: Final = 0.1
_REST: Final = 9
"""Times as long as weighing took; then it takes a tenth of the thread's time at most."""
_KEPT: Final = 1024
"""Connections that were heard, which are remembered in case the monitor is late: as many as it queues."""
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128
"""Of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


@attrs.frozen(eq=False)
class _Stranger:
    descriptor: int
    address: tuple[object, ...]


class Usher:
    """Follows who comes to a socket that listens, on a thread of its own, and cuts strangers off.

    Args:
        socket: Made with `EVENTS` (`sockets.router`); closed after this.
        most: Strangers at once; None: half of the files that this process may have open (`raised_limit`).
        most_bytes: That they may have sent, all together.
    """

    def __init__(self, socket: Socket, most: int | None = None, most_bytes: int = MOST_BYTES) -> None:
        self._socket: Final = socket
        self._most: Final = max(_FEWEST, raised_limit() // 2) if most is None else most
        self._most_bytes: Final = most_bytes
        self._monitor: Final[Socket] = socket.get_monitor_socket()
        # Both by the number of the connection's file, the oldest first; they change together.
        self._strangers: Final[dict[int, _Stranger]] = {}
        self._heard: Final[dict[int, str]] = {}
        self._lock: Final = threading.Lock()
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

    def heard(self, descriptor: int, host: str) -> None:
        """Take a connection for that of somebody who may speak. From any thread.

        Args:
            descriptor: Number of its file (`ZMQ_SRCFD`), which another may have by now.
            host: At its other end (`Peer-Address`).
        """
        if self._heard.get(descriptor) == host and descriptor not in self._strangers:  # as with almost every message
            return
        with self._lock:
            stranger = self._strangers.get(descriptor)
            if stranger is not None and _host_of(stranger.address) == host:
                del self._strangers[descriptor]
            self._heard.pop(descriptor, None)
            self._heard[descriptor] = host
            if len(self._heard) > _KEPT:
                del self._heard[next(iter(self._heard))]

    def close(self) -> None:
        """Follow no more. Called by the socket's thread, before it closes the socket. Idempotent."""
        if self._monitor.closed:
            return
        if not self._socket.closed:
            self._socket.disable_monitor()  # else libzmq would wait for whoever reads what it tells
        self._stop.set()
        self._thread.join()
        self._monitor.close()

    def _serve(self) -> None:
        weigh_at = 0.0
        while not self._stop.is_set():
            try:
                if self._monitor.poll(_POLL_MS):
                    news = recv_monitor_message(self._monitor)
                    self._take(news["event"], news["value"])
                if (now := time.monotonic()) >= weigh_at:
                    self._weigh()
                    weigh_at = time.monotonic() + max(_WEIGH_S, _REST * (time.monotonic() - now))
            except Exception:  # noqa: BLE001 - whatever it is, the others are still bounded
                _LOG.exception("strangers are not bounded as they should be; going on")
                self._stop.wait(_WEIGH_S)

    def _take(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._welcome(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self._forget(descriptor)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            self._num_failed += 1
            if self._num_failed.bit_count() == 1:
                why = os.strerror(descriptor)
                _LOG.warning("a connection could not be accepted (%d so far): %s", self._num_failed, why)

    def _welcome(self, descriptor: int) -> None:
        address = _address_of(descriptor)
        if address is None:
            self._forget(descriptor)
            return
        with self._lock:
            self._strangers.pop(descriptor, None)
            if self._heard.get(descriptor) == _host_of(address):  # before this thread came to it
                return
            stranger = self._strangers[descriptor] = _Stranger(descriptor, address)
            are_too_many = len(self._strangers) > self._most
        if are_too_many:
            self._cut_off(stranger, f"more than {self._most} at once")

    def _forget(self, descriptor: int) -> None:
        with self._lock:
            self._strangers.pop(descriptor, None)
            self._heard.pop(descriptor, None)

    def _weigh(self) -> None:
        """Cut off those who sent most, until what is left is not too much."""
        with self._lock:
            strangers = list(self._strangers.values())
        sizes = [(_received(stranger), stranger) for stranger in strangers]
        total = sum(size for size, _ in sizes)
        for size, stranger in sorted(sizes, key=lambda each: -each[0]):
            if total <= self._most_bytes:
                return
            total -= size
            self._cut_off(stranger, f"{total + size:,} bytes before a word that could be read")

    def _cut_off(self, stranger: _Stranger, reason: str) -> None:
        with self._lock:
            if self._strangers.get(stranger.descriptor) is not stranger:  # it has been heard meanwhile
                return
            del self._strangers[stranger.descriptor]
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:  # ever less often: whoever knocks must not fill the log
            _LOG.warning("cut off a stranger at %s (%d so far): %s", stranger.address, self._num_refused, reason)
        with _opened(stranger.descriptor) as connection, contextlib.suppress(OSError):
            # libzmq may have closed it, and its number be another's by now.
            if connection is not None and connection.getpeername() == stranger.address:
                connection.shutdown(network.SHUT_RDWR)


def raised_limit() -> int:
    """How many files this process may have open, after asking for as many as it may be given."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # some systems have a lower bound of their own
        _LOG.info("%d files may be open, and no more can be had: %s", soft, error)
        return soft
    return wanted


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


def _host_of(address: tuple[object, ...]) -> str:
    return str(address[0])


def _received(stranger: _Stranger) -> int:
    """Bytes that came from a stranger; 0 where the system does not tell."""
    with _opened(stranger.descriptor) as connection, contextlib.suppress(OSError, AttributeError, struct.error):
        if connection is not None and connection.getpeername() == stranger.address:
            told = connection.getsockopt(network.IPPROTO_TCP, network.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
            return int(_RECEIVED.unpack_from(told, _RECEIVED_AT)[0])
    return 0
