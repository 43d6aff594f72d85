"""Fetches payloads from the replicas that made them.

An endpoint that is malformed, or sends what is malformed, is a `TransportError`; one that is gone has nothing.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from cosmos_core.errors import TransportError
from cosmos_core.transport.addresses import without_key
from cosmos_core.transport.authentication import Keyring, reach
from cosmos_core.transport.frames import MAX_FRAMES, REPLIES, REQUESTS, Absent, Fetch, Found, unpack
from cosmos_core.transport.sockets import (
    BULK,
    HANDSHAKE_EVENTS,
    Closing,
    Context,
    Socket,
    offer,
    receive_frames,
    refusal,
    stop_monitor,
)
from cosmos_core.types import Payload

_LOG: Final = logging.getLogger(__name__)

_EVENTS: Final = HANDSHAKE_EVENTS | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_MOST_REFUSALS: Final = 5
"""Failed connections in a row after which an endpoint is given up; about a second and a half."""
_ABSENT_S: Final = 10.0
"""Time without a connection after which an endpoint is given up: a machine that is cut off does not even refuse."""
_LIMITS: Final = attrs.evolve(BULK, cut_ms=5000)
"""A client sends one small request at a time, which fits into the buffers of a server that is slow or stopped: what
stays unconfirmed is not waiting to be read, its link is cut."""
_LOOK_S: Final = 0.5


class PayloadClient(Closing):
    """Fetches from many endpoints at once; connections stay open between fetches, unless the other end closed its own.

    One fetch at a time: a second thread waits for the first one's fetch.
    """

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring: Final = keyring
        self._context: Final[zmq.Context[Socket]] = zmq.Context()
        self._peers: Final[dict[str, _Peer]] = {}
        self._lock: Final = threading.Lock()
        self._request = 0

    def fetch(self, requests: Mapping[str, Sequence[int]], timeout_s: float) -> dict[int, list[Payload]]:
        """Fetch what is held under leases, by the endpoint that holds them; `timeout_s` is for all of it.

        Returns payloads by lease, their arrays read-only views of what was received. A lease that is not in it is
        missing: its holder does not have it, is gone, or did not send it in time.
        """
        with self._lock:
            self._request += 1
            deadline = time.monotonic() + timeout_s
            found: dict[int, list[Payload]] = {}
            for peer in self._peers.values():
                # What nobody reads for half an hour stops the thread of all connections.
                peer.on_events()
            try:
                asked = [self._peer(endpoint) for endpoint, leases in requests.items() if leases]
                for peer in asked:
                    peer.ask(self._request, requests[peer.endpoint])
                self._collect(asked, found, deadline)
            except TransportError:
                # A stream that went wrong is not trusted for the rest of it.
                self._forget(list(self._peers.values()))
                raise
            self._forget([peer for peer in self._peers.values() if peer.waiting or peer.is_gone()])
            return found

    def close(self) -> None:
        """Disconnect from all endpoints."""
        with self._lock:
            self._forget(list(self._peers.values()))
            self._context.term()

    def _collect(self, peers: Sequence[_Peer], found: dict[int, list[Payload]], deadline: float) -> None:
        poller = zmq.Poller()
        by_socket = {}
        for peer in peers:
            for socket in (peer.socket, peer.monitor):
                poller.register(socket, zmq.POLLIN)
                by_socket[socket] = peer
        while any(peer.waiting and not peer.is_given_up for peer in peers):
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                break
            for socket, _ in poller.poll(math.ceil(min(wait_s, _LOOK_S) * 1000)):
                peer = by_socket[socket]
                if socket is peer.monitor:
                    peer.on_events()
                else:
                    found.update(peer.receive())

    def _peer(self, endpoint: str) -> _Peer:
        if endpoint not in self._peers:
            self._peers[endpoint] = _Peer(self._context, endpoint, self._keyring)
        return self._peers[endpoint]

    def _forget(self, peers: Sequence[_Peer]) -> None:
        for peer in peers:
            if peer.waiting:
                _LOG.warning("%s: %d leases are missing", without_key(peer.endpoint), len(peer.waiting))
            peer.close()
            del self._peers[peer.endpoint]


class _Peer:
    """The connection to one endpoint; `waiting` are leases asked for and not answered."""

    def __init__(self, context: Context, endpoint: str, keyring: Keyring | None) -> None:
        address, slash, token = endpoint.rpartition("/")
        if not slash or not token or "://" not in address:
            raise TransportError(f"{endpoint!r} is no payload endpoint; one looks like tcp://HOST:PORT#KEY/TOKEN")
        self.endpoint: Final = endpoint
        identity = secrets.token_bytes(8).hex().encode()
        self.socket: Final = reach(keyring, context, address, identity, _LIMITS, queued=True, events=_EVENTS)
        self.monitor: Final = self.socket.get_monitor_socket()
        self.waiting: Final[set[int]] = set()
        self._token: Final = token
        self._request = 0
        self._refusals = 0
        # Since when there is no connection; None while there is one.
        self._absent_since: float | None = time.monotonic()

    def is_gone(self) -> bool:
        """True if the connection broke and there is no other one yet; libzmq would try for ever."""
        self.on_events()
        return self._absent_since is not None or self.is_given_up

    @property
    def is_given_up(self) -> bool:
        """True if connections to it keep failing, or none comes about."""
        is_absent = self._absent_since is not None and time.monotonic() - self._absent_since > _ABSENT_S
        return is_absent or self._refusals >= _MOST_REFUSALS

    def ask(self, request: int, leases: Sequence[int]) -> None:
        """Ask for leases; what became of the connection has been read (`on_events`)."""
        self.waiting.clear()
        self._request = request
        self.waiting.update(leases)
        self._send()

    def on_events(self) -> None:
        """Take in what became of connections; one that broke took the request with it, so it is sent again."""
        while self.monitor.poll(0):
            news = recv_monitor_message(self.monitor)
            event = news["event"]
            if problem := refusal(event, news["value"]):
                # libzmq tries no more.
                _LOG.warning("%s: %s", without_key(self.endpoint), problem)
                self._refusals = _MOST_REFUSALS
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusals = 0
                self._absent_since = None
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._refusals += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._absent_since = self._absent_since or time.monotonic()
                if self.waiting:
                    self._send()

    def receive(self) -> dict[int, list[Payload]]:
        """Receive the replies that are here; those to an earlier fetch are dropped."""
        found: dict[int, list[Payload]] = {}
        # All of them, wanted or not: one left at the socket would keep the poller awake.
        while True:
            try:
                head, *frames = receive_frames(self.socket, 1 + MAX_FRAMES)
                self._on_reply(REPLIES.decode(head.buffer), [frame.buffer for frame in frames], found)
            except zmq.Again:
                break
            except TransportError as error:
                raise TransportError(f"{without_key(self.endpoint)} sent a malformed reply: {error}") from error
        return found

    def _send(self) -> None:
        fetch = Fetch(token=self._token, request=self._request, leases=tuple(sorted(self.waiting)))
        offer(self.socket, [REQUESTS.encode(fetch)])

    def _on_reply(self, reply: Found | Absent, frames: Sequence[memoryview], found: dict[int, list[Payload]]) -> None:
        if reply.request != self._request:
            return
        if isinstance(reply, Absent):
            self.waiting.difference_update(reply.leases)
        elif reply.lease in self.waiting:
            found[reply.lease] = unpack(reply.payloads, frames)
            self.waiting.discard(reply.lease)

    def close(self) -> None:
        """Disconnect."""
        stop_monitor(self.socket)
        self.socket.close()
