"""One end of a lifeline's connection: whole messages over TCP, each after its length."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final, TypeAlias

import attrs

from cosmos_core.errors import TransportError
from cosmos_core.transport.codec import Codec


@attrs.frozen(kw_only=True)
class Join:
    """A follower is there; `token` shows that it belongs to this start of the run."""

    rank: int
    token: str
    pid: int


@attrs.frozen(kw_only=True)
class Failure:
    """A process cannot go on.

    Attributes:
        rank: Which.
        reason: Its error.
        time: `time.time()` when it happened: processes may be on several machines.
        is_echo: Whether it may be no more than what another's failure looks like from here.
        is_loss: Whether the process ended without a word, as one does that is killed.
    """

    rank: int
    reason: str
    time: float
    is_echo: bool
    is_loss: bool = False


@attrs.frozen(kw_only=True)
class Abandon:
    """Waiting for the gradient group of this generation, or an older one, has become pointless."""

    generation: int


@attrs.frozen(kw_only=True)
class End:
    """The replica ends because of this error; `is_loss` as in `Failure`."""

    reason: str
    is_loss: bool = False


@attrs.frozen(kw_only=True)
class Goodbye:
    """This process has done its work; up, it waits for the leader's goodbye, and down, it is free to go."""


@attrs.frozen(kw_only=True)
class Ping:
    """This process is there: the leader says it now and then, and each follower answers with the same."""


Message: TypeAlias = Join | Failure | Abandon | End | Goodbye | Ping

_CODEC: Final = Codec((Join, Failure, Abandon, End, Goodbye, Ping))
_LENGTH: Final = struct.Struct(">I")
_MAX_BYTES: Final = 16 << 20
_MAX_JOIN_BYTES: Final = 4 << 10
"""Of one who has not joined, and may be anybody."""
_SEND_TIMEOUT_S: Final = 2.0
_SILENCE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A machine that no longer answers is gone after half a minute."""


class Wire:
    """A connection; one thread receives, any may send.

    Args:
        connection: Taken over.

    Attributes:
        rank: The process at the other end; negative before it has joined.
        pid: Its process id.
        has_left: Whether it said goodbye.
        began_at: When it was connected (`time.monotonic()`),
        heard_at: and when it was last heard.
    """

    def __init__(self, connection: socket.socket, rank: int = -1) -> None:
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.connection: Final = connection
        self.rank = rank
        self.pid = 0
        self.has_left = False
        self.began_at: Final = time.monotonic()
        self.heard_at = self.began_at
        self._sending: Final = threading.Lock()
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Send; one who is gone is noticed by whoever receives."""
        data = _CODEC.encode(message)
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Message] | None:
        """The messages that have come; None once the other end is gone. Call it when there is something to read.

        Raises:
            TransportError: What came is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard_at = time.monotonic()
        self._received += data
        return list(self._whole())

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _whole(self) -> Iterator[Message]:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            most = _MAX_BYTES if self.rank >= 0 else _MAX_JOIN_BYTES
            if length > most:
                raise TransportError(f"a message of {length:,} bytes; {most:,} are the most")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            yield _CODEC.decode(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
