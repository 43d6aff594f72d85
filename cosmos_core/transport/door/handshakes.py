"""Why two sides do not come to speak: libzmq tells it to monitors only, and after some failures never tries again."""

from __future__ import annotations

import errno
import time
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from cosmos_core.errors import RefusedError
from cosmos_core.transport.sockets import Socket

EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""What the socket must monitor."""
_HUNG_UP: Final = frozenset({errno.EPIPE, errno.ECONNRESET})
"""How a peer looks that ends the connection in the middle; one that says nothing at all may be stopped for a while."""
_MOST: Final = 5
_PATIENCE_S: Final = 3.0
"""A controller that ends while it is spoken to hangs up, too, but not for so long."""


class Handshakes:
    """Follows the handshakes of a DEALER. Used by the socket's thread; closed before the socket.

    Args:
        socket: Made with `EVENTS` (`sockets.dealer`).
        address: Where to, for messages.

    Attributes:
        monitor: Readable when there is news.
    """

    def __init__(self, socket: Socket, address: str) -> None:
        self._address: Final = address
        self._socket: Final = socket
        self.monitor: Final[Socket] = socket.get_monitor_socket()
        self._num_failed = 0
        self._failing_since = 0.0

    def check(self) -> None:
        """Take in the news.

        Raises:
            RefusedError: The other side refuses this one, or is not who it should be; waiting does not help.
        """
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
            self._socket.disable_monitor()
            self.monitor.close()

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
    """What a failed handshake says of the two sides; empty if it says nothing, and another may succeed."""
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
