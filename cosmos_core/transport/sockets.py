"""ZeroMQ sockets with every option that reliable use needs, set in one place.

Message sizes are bounded by `MAXMSGSIZE`, which libzmq applies to each part; the number of parts is bounded by
`receive`. A send never blocks: what cannot be queued is dropped, because every protocol here repeats itself.

ZeroMQ's heartbeats are off at both ends: libzmq ends the process (`Assertion failed: !_io_error`) when a ping meets a
closed connection whose reader has a full queue. The kernel asks an idle peer instead (keepalive).

An address that cannot be listened on or connected to is a `TransportError` that says what to do, and so is a message of
more parts than it may have, of which nothing is kept. Where there is none to receive, `zmq.Again` says so.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, TypeAlias

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from cosmos_core.errors import RefusedError, TransportError
from cosmos_core.transport.addresses import WILDCARDS, in_url, own_address
from cosmos_core.transport.keys import KeyPair

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_KEEPALIVE: Final = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
"""Seconds, and questions without an answer: an idle connection to a machine that is gone is closed after 25 s."""
_HANDSHAKE_MS: Final = 10_000

_MONITORS: Final = itertools.count()

_BIND_PROBLEMS: Final = {
    zmq.EADDRINUSE: "the port is in use; set control.port to another one, or to 0 for any free one",
    zmq.EADDRNOTAVAIL: "this machine has no such address; bind to one of its own, or to 0.0.0.0",
    errno.ENODEV: "this machine has no such address; bind to one of its own, or to 0.0.0.0",
    zmq.EINVAL: "this is not an address; bind to an IP address of this machine and a port from 0 to 65535",
}

HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""What a socket must monitor for `Handshakes`."""
_HUNG_UP: Final = frozenset({errno.EPIPE, errno.ECONNRESET})
"""How a peer looks that ends the connection in the middle; one that says nothing at all may be stopped for a while."""
_MOST: Final = 5
_PATIENCE_S: Final = 3.0
"""A controller that ends while it is spoken to hangs up, too, but not for so long."""


class Closing:
    """Whatever holds sockets or files is closed at the end of its `with` block."""

    def close(self) -> None:
        """Let go of what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds and timers of a socket; a peer that sends a larger part than `part_bytes` is disconnected."""

    part_bytes: int
    queue: int
    """Messages queued per peer, each way."""
    cut_ms: int = 0
    """Time for which what is sent may stay without the other machine's confirmation, before the connection is given up
    (and made anew, by a DEALER): its link is cut. A peer whose buffers are full takes nothing either, so it is only for
    those who send little. 0 leaves it to the system, which waits for minutes."""


@attrs.frozen(kw_only=True)
class Curve:
    """Keys that encrypt a connection and tell each side who the other is: this side's, and the server's public one."""

    own: KeyPair
    server: str


CONTROL: Final = Limits(part_bytes=64 << 20, queue=1000)
"""Small messages. A process that ends closes its connection, which is noticed at once; one that is frozen, or whose
link is cut, is missed by its beats."""

BULK: Final = Limits(part_bytes=4 << 30, queue=10_000)
"""Payloads and weights."""


def router(
    context: Context, bind: str, port: int, limits: Limits = CONTROL, *, own: KeyPair | None = None, events: int = 0
) -> Socket:
    """Make a ROUTER that listens on `bind` (an IP address of this machine; 0.0.0.0: all) and `port` (0: any free).

    With `own`, only peers that know its public key can speak to it, and only those whom the context's
    authenticator lets in (`transport.authentication`; without one, nobody). `events` are what
    `Socket.get_monitor_socket` tells, as of `dealer`.
    """
    bind = bind.strip("[]")
    if bind in WILDCARDS:
        own_address(bind)  # else what listens already would have to be closed again
    if not 0 <= port <= 65535:  # libzmq would take it modulo 2**16
        raise TransportError(f"cannot listen on port {port} of {bind}: a port is a number from 0 to 65535")
    socket = context.socket(zmq.ROUTER)
    _configure(socket, limits)
    # Without handover a restarted peer with its old identity shakes hands and then gets nothing, for ever.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 1024)
    if own is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        _set_keys(socket, own)
        # Else libzmq would let everyone in where there is no authenticator.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, "cosmos")
    host = in_url(bind)
    endpoint = f"tcp://{host}:{port or '*'}"
    if ":" in bind:
        socket.setsockopt(zmq.IPV6, 1)
    if events:
        _monitor(socket, events)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        _give_up(socket, events)
        remedy = _BIND_PROBLEMS.get(error.errno or 0, "choose another address or port")
        raise TransportError(f"cannot listen on tcp://{host}:{port} ({error}): {remedy}") from None
    return socket


def dealer(
    context: Context,
    address: str,
    identity: bytes,
    limits: Limits = CONTROL,
    *,
    queued: bool = False,
    curve: Curve | None = None,
    events: int = 0,
) -> Socket:
    """Make a DEALER that connects to `tcp://HOST:PORT`, which need not listen yet.

    It is known there by `identity`, at most 255 bytes. If messages are not to be `queued` until a connection exists,
    `offer` refuses them meanwhile, so that what a protocol repeats does not pile up for a peer that is away. `events`
    are what `Socket.get_monitor_socket` tells, from the first connection on; 0: nothing.
    """
    socket = context.socket(zmq.DEALER)
    _configure(socket, limits)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 0 if queued else 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if curve is not None:
        _set_keys(socket, curve.own)
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, curve.server)
    if events:
        _monitor(socket, events)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        _give_up(socket, events)
        raise TransportError(f"cannot connect to {address!r} ({error}); it must look like tcp://HOST:PORT") from None
    return socket


def address_of(socket: Socket) -> str:
    """The address at which others reach a bound socket, `tcp://HOST:PORT`."""
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    address = host.strip("[]")
    return f"tcp://{in_url(own_address(address) if address in WILDCARDS else address)}:{port}"


def receive(socket: Socket, parts: int) -> list[bytes]:
    """Receive one message of at most `parts` parts; of a longer one, nothing is kept."""
    return [frame.bytes for frame in receive_frames(socket, parts)]


def receive_frames(socket: Socket, parts: int) -> list[zmq.Frame]:
    """Receive one message as `receive` does, its parts as frames, which are not copied."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        if len(frames) == parts:
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(copy=False)
            raise TransportError(f"a message of more than {parts} parts was dropped")
        frames.append(socket.recv(copy=False))
    return frames


def receive_marked(socket: Socket, parts: int) -> tuple[zmq.Frame, list[bytes]]:
    """Receive one message from a ROUTER as `receive` does: its first part as a frame, which knows who sent it."""
    first = socket.recv(zmq.NOBLOCK, copy=False)
    return first, receive(socket, parts - 1) if first.more else []


def offer(socket: Socket, parts: Sequence[bytes | memoryview], *, copy: bool = True) -> bool:
    """Send a message without waiting; False if the peer is gone or its queue is full.

    Of a ROUTER, the peer's identity is the first part. What is not copied must stay unchanged until sent: libzmq holds
    it.
    """
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


def _monitor(socket: Socket, events: int) -> None:
    # The name that pyzmq gives is the number of a file, which may be another socket's before libzmq forgets the name.
    socket.get_monitor_socket(events, f"inproc://monitor-{next(_MONITORS)}")


def stop_monitor(socket: Socket) -> None:
    """Close the monitor of a socket that connects, before the socket is closed; its messages are read first.

    After some two thousand that nobody read, libzmq's thread waits for a reader, and `disable_monitor` would wait for
    that thread. A socket that listens may be told more meanwhile: `ConnectionLimiter.close` is for that.
    """
    monitor = socket.get_monitor_socket()
    while monitor.poll(0):
        monitor.recv_multipart()
    socket.disable_monitor()
    monitor.close()


def _configure(socket: Socket, limits: Limits) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.part_bytes)
    socket.setsockopt(zmq.SNDHWM, limits.queue)
    socket.setsockopt(zmq.RCVHWM, limits.queue)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    if limits.cut_ms:
        socket.setsockopt(zmq.TCP_MAXRT, limits.cut_ms)


def _give_up(socket: Socket, events: int) -> None:
    if events:
        stop_monitor(socket)
    socket.close()


def _set_keys(socket: Socket, own: KeyPair) -> None:
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)


class Handshakes:
    """Follows the handshakes of a DEALER: libzmq tells only monitors why two sides do not come to speak.

    After some failures it never tries again. Used by the socket's thread; closed before the socket, which is made with
    `HANDSHAKE_EVENTS` (`dealer`). The monitor is readable when there is news.
    """

    def __init__(self, socket: Socket, address: str) -> None:
        self._address: Final = address
        self._socket: Final = socket
        self.monitor: Final[Socket] = socket.get_monitor_socket()
        self._num_failed = 0
        self._failing_since = 0.0

    def check(self) -> None:
        """Take in the news."""
        while self.monitor.poll(0):
            news = recv_monitor_message(self.monitor)
            event, value = news["event"], news["value"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_failed = 0
            elif problem := refusal(event, value):
                raise RefusedError(f"{self._address}: {problem}")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in _HUNG_UP:
                self._hung_up(time.monotonic())

    def close(self) -> None:
        """Follow no more. Idempotent."""
        if not self.monitor.closed:
            stop_monitor(self._socket)

    def _hung_up(self, now: float) -> None:
        if not self._num_failed:
            self._failing_since = now
        self._num_failed += 1
        if self._num_failed >= _MOST and now - self._failing_since >= _PATIENCE_S:
            raise RefusedError(
                f"{self._address}: whoever listens there hung up {self._num_failed} times in the handshake: it has "
                "another key than `server` in this process's key file, or it is something else; does the folder of "
                "keys (control.keys) belong to this run?"
            )


def refusal(event: int, value: int) -> str:
    """The reason of a failed handshake; empty if it says nothing of the two sides, and another may succeed."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return (
            f"it refuses this process's key (status {value}): the key is not in its allow-list, or was revoked; "
            "whoever runs it can let it in with `cosmos keys allow`"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return (
            f"it speaks otherwise (ZeroMQ error 0x{value:x}): one side has keys and the other has none, or it is no "
            "ZeroMQ socket at all; is the address right?"
        )
    return ""
