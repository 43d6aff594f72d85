"""The door of a process: who may connect to its sockets, and who is speaking.

libzmq asks a handler at `inproc://zeromq.zap.01` of its context (ZeroMQ RFC 27) about each key that wants in; this one
answers from the allow-list. A connection outlives its key, so whoever receives a message asks `Door.who` again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from types import TracebackType
from typing import Final, Self

import attrs
import zmq
from zmq.utils import z85

from cosmos_core.errors import TransportError
from cosmos_core.transport.door.endpoints import hexadecimal
from cosmos_core.transport.door.usher import EVENTS, Usher
from cosmos_core.transport.keys.allowed import AllowList, Peer
from cosmos_core.transport.keys.key import ROLES, KeyPair, PeerRole
from cosmos_core.transport.sockets import Context, Limits, Socket, address_of, router

_LOG: Final = logging.getLogger(__name__)

_ZAP: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_POLL_MS: Final = 100
_PAUSE_S: Final = 0.1
_USER: Final = "User-Id"
_HOST: Final = "Peer-Address"


class Door:
    """Lets those of an allow-list in. Its methods may be called from any thread.

    Close it after the sockets of its context.

    Args:
        context: Whose sockets it guards.
        allowed: Who may speak.
        roles: What they must be.
    """

    def __init__(self, context: Context, allowed: AllowList, roles: Collection[PeerRole] = ROLES) -> None:
        self.allowed: Final = allowed
        self._roles: Final = frozenset(roles)
        self._stop: Final = threading.Event()
        self._num_refused = 0
        self._socket: Final = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread: Final = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """Connections that were refused."""
        return self._num_refused

    def who(self, frame: zmq.Frame) -> Peer | None:
        """Who sent a message, of which this is a frame; None if they may not speak (any more)."""
        try:
            public = frame.get(_USER)
        except zmq.ZMQError:
            return None
        return self.find(str(public))

    def find(self, public: str) -> Peer | None:
        """Who holds a key; None if nobody who may speak here does."""
        peer = self.allowed.find(public)
        return peer if peer is not None and peer.role in self._roles else None

    def close(self) -> None:
        """End; from now on nobody can connect. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(_POLL_MS):
                    self._answer(self._socket.recv_multipart())
            except Exception:  # noqa: BLE001 - without an answer nobody could connect any more
                _LOG.exception("a connection's key could not be looked up; going on")
                self._stop.wait(_PAUSE_S)

    def _answer(self, request: list[bytes]) -> None:
        # Envelope (an identity, and an empty part), version, request, domain, address, identity, mechanism, and of
        # CURVE the key, as 32 bytes.
        envelope, fields = request[:2], request[2:]
        if len(fields) < 6 or fields[0] != _VERSION:
            return
        _, number, _, address, _, mechanism, *credentials = fields
        public = ""
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            public = z85.encode(credentials[0]).decode("ascii")
        if self.find(public) is not None:
            answer = [b"200", b"OK", public.encode("ascii")]
        else:
            answer = [b"400", b"this key may not speak here", b""]
            self._note(address.decode("ascii", "replace"), public)
        self._socket.send_multipart([*envelope, _VERSION, number, *answer, b""])

    def _note(self, address: str, public: str) -> None:
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:  # ever less often: whoever knocks must not fill the log
            _LOG.warning(
                "refused a connection from %s (%d so far): key %s may not speak here; see %s",
                address,
                self._num_refused,
                public or "(none)",
                self.allowed.path,
            )


@attrs.frozen(kw_only=True, eq=False)
class Guarded:
    """A socket that listens, and its door.

    Attributes:
        socket: A ROUTER.
        door: Who may speak there; None: whoever finds it.
        usher: Bounds those who have not spoken yet; None without a door.
        endpoint: Where others reach it: `tcp://HOST:PORT`, and `#` with its public key in hexadecimal if it has one.
    """

    socket: Socket
    door: Door | None
    usher: Usher | None
    endpoint: str

    def who(self, frame: zmq.Frame) -> Peer | None:
        """Who sent a message, of which this is a frame; None if they may not speak (any more), or there is no door."""
        peer = None if self.door is None else self.door.who(frame)
        if peer is not None and self.usher is not None:
            host = str(frame.get(_HOST)).partition("%")[0]
            self.usher.heard(int(frame.get(zmq.SRCFD)), host)
        return peer

    @property
    def num_refused(self) -> int:
        """Connections that were refused for their key, or cut off because there were too many."""
        return sum(each.num_refused for each in (self.door, self.usher) if each is not None)

    def close(self, *, linger_ms: int = 0) -> None:
        """Listen no more; what was said has so long to leave."""
        if self.usher is not None:
            self.usher.close()
        self.socket.close(linger=linger_ms)
        if self.door is not None:
            self.door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def listen(
    context: Context,
    bind: str,
    port: int,
    limits: Limits,
    *,
    own: KeyPair | None = None,
    allowed: AllowList | None = None,
    roles: Collection[PeerRole] = ROLES,
) -> Guarded:
    """Listen for those who may speak.

    Args:
        context: Of this socket alone.
        bind: IP address of this machine.
        port: 0 takes a free one.
        limits: Bounds and timers.
        own: The key that the peers must know; None: without keys and without a door, as tests and measurements do.
        allowed: Who may speak; given with `own`.
        roles: What they must be.

    Raises:
        TransportError: The address cannot be listened on.
    """
    if own is None:
        socket = router(context, bind, port, limits)
        return Guarded(socket=socket, door=None, usher=None, endpoint=address_of(socket))
    assert allowed is not None, "whoever has a key has a list"
    door = Door(context, allowed, roles)
    try:
        socket = router(context, bind, port, limits, own=own, events=EVENTS)
    except TransportError:
        door.close()
        raise
    endpoint = f"{address_of(socket)}#{hexadecimal(own.public)}"
    return Guarded(socket=socket, door=door, usher=Usher(socket), endpoint=endpoint)
