"""Bounds the connections of strangers: of whoever was accepted and has said nothing yet that could be read.

libzmq accepts connections until the process has no files left. A crowd of replicas are strangers, too, until they were
heard, so only what would use up the process's files is too many: whoever comes then is cut off, and connects again, and
those who are silent are ended by libzmq (`HANDSHAKE_IVL`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as network
import threading
from collections.abc import Iterator
from typing import Final, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.transport.sockets import Socket

_LOG: Final = logging.getLogger(__name__)

EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
"""What the socket must monitor."""
_FEWEST: Final = 256
_FILES: Final = 65_536
"""That are asked for: each connection takes some 15 KB of memory besides."""
_PAUSE_S: Final = 0.1
_KEPT: Final = 2000
"""Connections that were heard, which are remembered in case the monitor is late: as many as it queues."""
_Address: TypeAlias = tuple[object, ...]
"""Host and port, as `socket.getpeername` tells them."""


class ConnectionLimiter:
    """Follows who comes to a socket that listens, on a thread of its own, and cuts strangers off.

    The socket is made with `EVENTS` (`sockets.router`), and `close` closes it. Without `most`, half of the files that
    this process may have open (`raised_limit`) may be strangers.
    """

    def __init__(self, socket: Socket, most: int | None = None) -> None:
        self._socket: Final = socket
        self._most: Final = max(_FEWEST, raised_limit() // 2) if most is None else most
        self._monitor: Final[Socket] = socket.get_monitor_socket()
        # Both by the number of the connection's file, the oldest first; they change together.
        self._strangers: Final[dict[int, _Address]] = {}
        self._heard: Final[dict[int, str]] = {}
        self._lock: Final = threading.Lock()
        self._is_closing: Final = threading.Event()
        self._refused, self._failed = RepeatedWarning(__name__), RepeatedWarning(__name__)
        self._thread: Final = threading.Thread(target=self._serve, name="connection-limiter", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """Connections that were cut off, or could not be accepted."""
        return self._refused.count + self._failed.count

    @property
    def num_strangers(self) -> int:
        """Connections from which nothing was heard yet."""
        return len(self._strangers)

    def heard(self, descriptor: int, host: str) -> None:
        """Take a connection for that of somebody who may speak. From any thread.

        Its file (`ZMQ_SRCFD`) may be another's by now; `host` is at its other end (`Peer-Address`).
        """
        if self._heard.get(descriptor) == host and descriptor not in self._strangers:  # as with almost every message
            return
        with self._lock:
            address = self._strangers.get(descriptor)
            if address is not None and address[0] == host:
                del self._strangers[descriptor]
            self._heard.pop(descriptor, None)
            self._heard[descriptor] = host
            if len(self._heard) > _KEPT:
                del self._heard[next(iter(self._heard))]

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the socket; messages that it took have `linger_ms` to leave. Called by the socket's thread. Idempotent.

        In a flood libzmq waits until its news of connections are read, so the reader goes on until the last. To disable
        the monitor first would wait for libzmq with Python's lock held, which the reader needs.
        """
        if self._monitor.closed:
            return
        self._is_closing.set()
        self._socket.close(linger=linger_ms)
        self._thread.join()
        self._monitor.close()

    def _serve(self) -> None:
        while True:
            try:
                news = recv_monitor_message(self._monitor)
                if news["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._take(news["event"], news["value"])
            except zmq.ContextTerminated:
                return
            except Exception:  # noqa: BLE001 - whatever it is, the others are still bounded
                _LOG.exception("strangers are not bounded as they should be; going on")
                self._is_closing.wait(_PAUSE_S)

    def _take(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._welcome(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self._forget(descriptor)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            self._failed("a connection could not be accepted: %s", os.strerror(descriptor))

    def _welcome(self, descriptor: int) -> None:
        address = _address_of(descriptor)
        if address is None:
            self._forget(descriptor)
            return
        with self._lock:
            self._strangers.pop(descriptor, None)
            if self._heard.get(descriptor) == address[0]:  # before this thread came to it
                return
            self._strangers[descriptor] = address
            are_too_many = len(self._strangers) > self._most
        if are_too_many:
            self._cut_off(descriptor, address)

    def _forget(self, descriptor: int) -> None:
        with self._lock:
            self._strangers.pop(descriptor, None)
            self._heard.pop(descriptor, None)

    def _cut_off(self, descriptor: int, address: _Address) -> None:
        with self._lock:
            if self._strangers.get(descriptor) is not address:  # it has been heard meanwhile
                return
            del self._strangers[descriptor]
        self._refused("cut off a stranger at %s: more than %d at once", address, self._most)
        with _opened(descriptor) as connection, contextlib.suppress(OSError):
            # libzmq may have closed it, and its number be another's by now.
            if connection is not None and connection.getpeername() == address:
                connection.shutdown(network.SHUT_RDWR)


def raised_limit() -> int:
    """The number of files that this process may have open, after asking for as many as it may be given."""
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
    with contextlib.ExitStack() as opened:
        found = None
        with contextlib.suppress(OSError):
            own = os.dup(descriptor)
            try:
                found = opened.enter_context(network.socket(fileno=own))
            except OSError:
                os.close(own)
        yield found


def _address_of(descriptor: int) -> _Address | None:
    """The address at the other end of a connection; None if it is over."""
    with _opened(descriptor) as connection, contextlib.suppress(OSError):
        return connection.getpeername() if connection is not None else None
    return None
