"""Keeping a port for the controller of a run, also while none listens on it.

Replicas of a controller that was killed go on connecting to its port. On one host such a connection may be given that
very port as its own end and meet itself; and any other process may take the port before the controller is back.
"""

from __future__ import annotations

import socket
from typing import Final, Self

from cosmos_core.errors import TransportError


class Reservation:
    """A port that is bound and not listened on: the kernel gives it to nobody, and who asks for it by number has it.

    Args:
        bind: Address to listen on, as in `control.bind`.
        port: Which; 0 takes a free one.

    Attributes:
        port: The port.

    Raises:
        TransportError: It cannot be had.
    """

    def __init__(self, bind: str, port: int) -> None:
        host = "" if bind == "*" else bind.strip("[]")
        self._socket: Final = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # libzmq sets it too: two that have it may be bound to one port as long as one of them listens at most.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise TransportError(
                f"port {port} of {bind} cannot be had ({error.strerror or error}); set control.port to another one, or "
                "to 0 for any free one, and control.bind to an address of this machine"
            ) from None
        self.port: Final[int] = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the port up."""
        self._socket.close()
