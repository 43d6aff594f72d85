"""Authentication of connections: who may connect to the sockets of a process, who is speaking, and what they may say.

libzmq asks a handler at `inproc://zeromq.zap.01` of its context (ZeroMQ RFC 27) about each key that wants in; this one
answers from the allow-list. A connection outlives its key, so whoever receives a message asks `Authenticator.who`
again.

Whatever listens besides the controller makes a key of its own for as long as it lives, and says it in its endpoint,
which reaches others through the controller. So nobody can pretend to be a replica that serves samples or weights. An
address that cannot be listened on, or reached with the keys that there are, is a `TransportError`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

import attrs
import zmq
from zmq.utils import z85

from cosmos_core.errors import TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.transport.addresses import hexadecimal, split_key
from cosmos_core.transport.connection_limiter import EVENTS, ConnectionLimiter
from cosmos_core.transport.key_folder import AllowList, Peer
from cosmos_core.transport.keys import ALLOWED, ROLES, Key, KeyPair, PeerRole, is_named
from cosmos_core.transport.messages import Beat, Command, Hello, Reports, Up
from cosmos_core.transport.sockets import Closing, Context, Curve, Limits, Socket, address_of, dealer, router

_LOG: Final = logging.getLogger(__name__)

_ZAP: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_POLL_MS: Final = 100
_PAUSE_S: Final = 0.1
_USER: Final = "User-Id"
_HOST: Final = "Peer-Address"


class Authenticator:
    """Lets those of an allow-list in, if their role is right. Its methods may be called from any thread.

    Close it after the sockets of its context.
    """

    def __init__(self, context: Context, allowed: AllowList, roles: Collection[PeerRole] = ROLES) -> None:
        self.allowed: Final = allowed
        self._roles: Final = frozenset(roles)
        self._stop: Final = threading.Event()
        self._refused = RepeatedWarning(__name__)
        self._socket: Final = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread: Final = threading.Thread(target=self._serve, name="authenticator", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """Connections that were refused."""
        return self._refused.count

    def who(self, frame: zmq.Frame) -> Peer | None:
        """The sender of a message, of which this is a frame; None if they may not speak (any more)."""
        try:
            public = frame.get(_USER)
        except zmq.ZMQError:
            return None
        return self.find(str(public))

    def find(self, public: str) -> Peer | None:
        """The holder of a key; None if nobody who may speak here does."""
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
            said = "refused a connection from %s: key %s may not speak here; see %s"
            self._refused(said, address.decode("ascii", "replace"), public or "(none)", self.allowed.path)
        self._socket.send_multipart([*envelope, _VERSION, number, *answer, b""])


@attrs.frozen(kw_only=True, eq=False)
class Listener(Closing):
    """A socket that listens, and the authentication of who speaks there.

    Attributes:
        authenticator: Who may speak there; None: whoever finds it.
        limiter: Bounds those who have not spoken yet; None without authentication.
        endpoint: Where others reach it: `tcp://HOST:PORT`, and `#` with its public key in hexadecimal if it has one.
    """

    socket: Socket
    authenticator: Authenticator | None
    limiter: ConnectionLimiter | None
    endpoint: str

    def who(self, frame: zmq.Frame) -> Peer | None:
        """The sender of a message, of which this is a frame; None if they may not speak (any more), or anyone may."""
        peer = None if self.authenticator is None else self.authenticator.who(frame)
        if peer is not None and self.limiter is not None:
            host = str(frame.get(_HOST)).partition("%")[0]
            self.limiter.heard(int(frame.get(zmq.SRCFD)), host)
        return peer

    @property
    def num_refused(self) -> int:
        """Connections that were refused for their key, or cut off because there were too many."""
        return sum(each.num_refused for each in (self.authenticator, self.limiter) if each is not None)

    def close(self, *, linger_ms: int = 0) -> None:
        """Listen no more; what was said has so long to leave."""
        if self.limiter is not None:
            self.limiter.close(linger_ms=linger_ms)
        self.socket.close(linger=linger_ms)
        if self.authenticator is not None:
            self.authenticator.close()


def listen(
    context: Context,
    bind: str,
    port: int,
    limits: Limits,
    *,
    own: KeyPair | None = None,
    allowed: AllowList | None = None,
    roles: Collection[PeerRole] = ROLES,
) -> Listener:
    """Listen for those who may speak; the context is of this socket alone, and port 0 takes a free one.

    The peers must know the key `own`. Without one (then `allowed` is not given either) whoever connects may speak, as
    in tests and measurements.
    """
    if own is None:
        socket = router(context, bind, port, limits)
        return Listener(socket=socket, authenticator=None, limiter=None, endpoint=address_of(socket))
    assert allowed is not None, "whoever has a key has a list"
    authenticator = Authenticator(context, allowed, roles)
    try:
        socket = router(context, bind, port, limits, own=own, events=EVENTS)
    except TransportError:
        authenticator.close()
        raise
    endpoint = f"{address_of(socket)}#{hexadecimal(own.public)}"
    return Listener(socket=socket, authenticator=authenticator, limiter=ConnectionLimiter(socket), endpoint=endpoint)


def refusal(peer: Peer, message: Up) -> str:
    """The reason why this peer may not send this message; empty if it may."""
    is_replica = peer.role in {"policy", "rollout"}
    if isinstance(message, Hello | Beat | Reports):
        if is_replica:
            return _as_replica(peer, message)
        return f"key {peer.label} is of role {peer.role}, which cannot speak as a replica"
    if isinstance(message, Command) and peer.role != "person":
        return f"key {peer.label} is of role {peer.role}, which may ask the run for nothing; a person's key may"
    return f"key {peer.label} is of role {peer.role}, which may not watch the run" if is_replica else ""


def _as_replica(peer: Peer, message: Hello | Beat | Reports) -> str:
    if not is_named(message.name, peer.names):
        return f"key {peer.label} may speak as {', '.join(peer.names) or 'nobody'}, not as {message.name!r}"
    if isinstance(message, Hello) and message.role != peer.role:
        return f"key {peer.label} is for {peer.role} replicas, and {message.name!r} says it is a {message.role} one"
    return ""


class Keyring:
    """The key of a process, and the list of those who may speak to it."""

    def __init__(self, folder: Path, own: Key) -> None:
        """Read the allow-list of a folder of keys."""
        self.own: Final = own
        self.allowed: Final = AllowList(folder / ALLOWED)


def serve(
    keyring: Keyring | None, context: Context, bind: str, limits: Limits, roles: Collection[PeerRole]
) -> Listener:
    """Listen at a free port of `bind` for those who have one of the roles; for anyone, without a keyring."""
    if keyring is None:
        return listen(context, bind, 0, limits)
    return listen(context, bind, 0, limits, own=KeyPair.new(), allowed=keyring.allowed, roles=roles)


def reach(
    keyring: Keyring | None,
    context: Context,
    endpoint: str,
    identity: bytes,
    limits: Limits,
    *,
    queued: bool = False,
    events: int = 0,
) -> Socket:
    """Connect to an endpoint of `serve`; the arguments are those of `sockets.dealer`."""
    address, server = split_key(endpoint)
    if keyring is None and server:
        raise TransportError(f"{endpoint}: it has a key, and this process has none; where is its folder of keys?")
    if keyring is not None and not server:
        raise TransportError(f"{endpoint}: it has no key, and this process speaks with none that has none")
    curve = None if keyring is None else Curve(own=keyring.own.pair, server=server)
    return dealer(context, address, identity, limits, queued=queued, curve=curve, events=events)
