"""The sample plane: a finished sample's arrays stay with their maker until the replica that trains on them asks.

The server holds payloads by lease and answers `Fetch` with one message per lease. An endpoint is
`tcp://HOST:PORT#KEY/TOKEN`; the token is random, so that nobody is served by a stranger on a port used again. Only
policy replicas are served. A `TransportError` says that an array cannot be sent, or that the server has ended or cannot
listen.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Sequence
from typing import Final, Self

import attrs
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.transport.authentication import Keyring, serve
from cosmos_core.transport.frames import REPLIES, REQUESTS, Absent, Fetch, Found, Packed, pack
from cosmos_core.transport.keys import PeerRole
from cosmos_core.transport.payload_client import PayloadClient
from cosmos_core.transport.sockets import BULK, Closing, Socket, offer, receive_marked
from cosmos_core.types import Payload

__all__ = ["PayloadClient", "PayloadServer"]


_LIMITS: Final = attrs.evolve(BULK, part_bytes=4 << 20)
"""A server only receives requests."""
_SERVED: Final[tuple[PeerRole, ...]] = ("policy",)


class PayloadServer(Closing):
    """Holds payloads by lease, and serves them from a thread. Its methods may be called from any thread."""

    def __init__(self, bind_host: str, keyring: Keyring | None = None) -> None:
        self._keyring: Final = keyring
        self._bind_host: Final = bind_host
        self._token: Final = secrets.token_hex(8)
        self._context: Final[zmq.Context[Socket]] = zmq.Context()
        self._wake: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock: Final = threading.Lock()
        self._store: Final[dict[int, Packed]] = {}
        self._thread: Final = threading.Thread(target=self._serve, name="payloads", daemon=True)
        self._closed = False
        self._ignored, self._unread = RepeatedWarning(__name__), RepeatedWarning(__name__)

    def start(self) -> Self:
        """Listen, and begin to serve."""
        self._listener = serve(self._keyring, self._context, self._bind_host, _LIMITS, _SERVED)
        self._socket = self._listener.socket
        self.endpoint = f"{self._listener.endpoint}/{self._token}"
        """The address at which clients find the server."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving and drop everything."""
        if self._closed:
            return
        self._closed = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._listener.close()
        self._context.term()
        os.close(self._wake)
        self._store.clear()

    def __enter__(self) -> Self:
        return self.start()

    @property
    def held(self) -> frozenset[int]:
        """Leases under which something is held."""
        with self._lock:
            return frozenset(self._store)

    @property
    def held_bytes(self) -> int:
        """Size of all that is held."""
        with self._lock:
            return sum(packed.nbytes for packed in self._store.values())

    def put(self, lease: int, payloads: Sequence[Payload]) -> None:
        """Hold payloads under `lease`, replacing what was there. Their arrays must not be changed any more."""
        if not self._thread.is_alive():
            raise TransportError(f"the payload server on {self._bind_host} is not running; see the log for its error")
        packed = pack(payloads)
        with self._lock:
            self._store[lease] = packed

    def release_except(self, leases: Collection[int]) -> None:
        """Drop what is held under any other lease; what is being sent stays until it is sent."""
        with self._lock:
            for lease in self._store.keys() - set(leases):
                del self._store[lease]

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closed:
            poller.poll()
            self._answer_all()

    def _answer_all(self) -> None:
        while not self._closed:
            try:
                self._answer_next()
            except zmq.Again:
                return
            except (TransportError, ValueError) as error:
                self._ignored("%s: ignored a malformed request: %s", self.endpoint, error)

    def _answer_next(self) -> None:
        first, body = receive_marked(self._socket, 2)
        if self._listener.authenticator is not None and self._listener.who(first) is None:
            raise TransportError("its key may not speak here any more")
        self._answer(first.bytes, REQUESTS.decode(b"".join(body)))

    def _answer(self, identity: bytes, fetch: Fetch) -> None:
        absent = []
        for lease in fetch.leases:
            with self._lock:
                packed = self._store.get(lease) if fetch.token == self._token else None
            if packed is None:
                absent.append(lease)
                continue
            header = REPLIES.encode(Found(request=fetch.request, lease=lease, payloads=packed.payloads))
            if not offer(self._socket, [identity, header, *packed.frames], copy=False):
                # The client asks again, or reports them missing.
                self._unread("%s: a client is gone or reads too slowly", self.endpoint)
                return
        if absent:
            offer(self._socket, [identity, REPLIES.encode(Absent(request=fetch.request, leases=tuple(absent)))])
