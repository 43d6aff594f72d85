"""ZeroMQ sockets with every option that reliable use needs, set in one place.

Message sizes are bounded by `MAXMSGSIZE`, which libzmq applies to each part; the number of parts is bounded by
`receive`. A send never blocks: what cannot be queued is dropped, because every protocol here repeats itself.
"""

from __future__ import annotations

import errno
import socket as network
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
import zmq

from cosmos_core.errors import TransportError

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_WILDCARDS: Final = frozenset({"0.0.0.0", "*", "::", "[::]"})  # noqa: S104 - compared with, not bound to
_BIND_PROBLEMS: Final = {
    zmq.EADDRINUSE: "the port is in use; set control.port to another one, or to 0 for any free one",
    zmq.EADDRNOTAVAIL: "this machine has no such address; bind to one of its own, or to 0.0.0.0",
    errno.ENODEV: "this machine has no such address; bind to one of its own, or to 0.0.0.0",
    zmq.EINVAL: "this is not an address; bind to an IP address of this machine and a port from 0 to 65535",
}


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds and timers of a socket.

    Attributes:
        part_bytes: Largest part that is received; a peer that sends a larger one is disconnected.
        queue: Messages queued per peer, each way.
        heartbeat_ms: Time between pings.
        heartbeat_timeout_ms: Silence after a ping that ends the connection. A pong waits behind the part that is
            being sent, so it must be longer than the largest part takes.
    """

    part_bytes: int
    queue: int
    heartbeat_ms: int
    heartbeat_timeout_ms: int


CONTROL: Final = Limits(part_bytes=64 << 20, queue=1000, heartbeat_ms=500, heartbeat_timeout_ms=1500)
"""Small messages; a dead peer is noticed within two seconds."""

BULK: Final = Limits(part_bytes=4 << 30, queue=10_000, heartbeat_ms=5000, heartbeat_timeout_ms=60_000)
"""Payloads and weights."""


def router(context: Context, bind: str, port: int, limits: Limits = CONTROL) -> Socket:
    """Make a ROUTER that listens on `bind` (an IP address of this machine; 0.0.0.0: all) and `port` (0: any free).

    Raises:
        TransportError: The address cannot be listened on; the message says what to do.
    """
    if not 0 <= port <= 65535:  # libzmq would take it modulo 2**16
        raise TransportError(f"cannot listen on port {port} of {bind}: a port is a number from 0 to 65535")
    socket = context.socket(zmq.ROUTER)
    _configure(socket, limits)
    # Without handover a restarted peer with its old identity shakes hands and then gets nothing, for ever.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 1024)
    host = f"[{bind}]" if ":" in bind else bind
    endpoint = f"tcp://{host}:{port or '*'}"
    if ":" in bind:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        remedy = _BIND_PROBLEMS.get(error.errno or 0, "choose another address or port")
        raise TransportError(f"cannot listen on tcp://{host}:{port} ({error}): {remedy}") from None
    return socket


def dealer(
    context: Context, address: str, identity: bytes, limits: Limits = CONTROL, *, queued: bool = False
) -> Socket:
    """Make a DEALER that connects to `address` and is known there by `identity`.

    Args:
        context: The process's ZeroMQ context.
        address: `tcp://HOST:PORT`; it need not listen yet.
        identity: At most 255 bytes, unique per connection at the peer.
        limits: Bounds and timers.
        queued: Whether to queue messages until a connection exists. If not, `offer` refuses them meanwhile, so that
            what a protocol repeats does not pile up for a peer that is away.

    Raises:
        TransportError: `address` is not an address.
    """
    socket = context.socket(zmq.DEALER)
    _configure(socket, limits)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 0 if queued else 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise TransportError(f"cannot connect to {address!r} ({error}); it must look like tcp://HOST:PORT") from None
    return socket


def address_of(socket: Socket) -> str:
    """The address at which others reach a bound socket, `tcp://HOST:PORT`.

    Bound to all interfaces, HOST is this machine's address on its default route, or else its name.
    """
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{_own_address() if host in _WILDCARDS else host}:{port}"


def receive(socket: Socket, parts: int, flags: int = zmq.NOBLOCK) -> list[bytes]:
    """Receive one message of at most `parts` parts; of a longer one, nothing is kept.

    Raises:
        zmq.Again: There is none (with `zmq.NOBLOCK`).
        TransportError: It had more parts. The socket is fine: the next message can be received.
    """
    message = [socket.recv(flags)]
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(flags)
        if len(message) < parts:
            message.append(part)
        else:
            drop_rest(socket)
            raise TransportError(f"a message of more than {parts} parts was dropped")
    return message


def drop_rest(socket: Socket) -> None:
    """Drop the parts of the current message that have not been received."""
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(copy=False)


def offer(socket: Socket, parts: Sequence[bytes | memoryview], *, copy: bool = True) -> bool:
    """Send a message without waiting.

    Args:
        socket: A DEALER, or a ROUTER with the peer's identity as the first part.
        parts: The message.
        copy: Whether to copy it; if not, the buffers must stay unchanged until sent (libzmq holds them).

    Returns:
        Whether it was queued: False if the peer is gone or its queue is full.
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


def _configure(socket: Socket, limits: Limits) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.part_bytes)
    socket.setsockopt(zmq.SNDHWM, limits.queue)
    socket.setsockopt(zmq.RCVHWM, limits.queue)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, limits.heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, limits.heartbeat_timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, limits.heartbeat_timeout_ms)


def _own_address() -> str:
    # Connecting a datagram socket sends nothing; it only asks the kernel which address it would use.
    with network.socket(network.AF_INET, network.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return network.gethostname()
        return str(probe.getsockname()[0])
