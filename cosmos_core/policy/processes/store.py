"""Where the members of a gradient group meet: a key-value store of torch's, which each replica's leader hosts."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cosmos_core.errors import TransportError
from cosmos_core.transport.addresses import in_url

FORM_TIMEOUT_S: Final = 60.0
"""Time for all members to appear; the controller has seen each of them alive."""


class GroupStore:
    """The rendezvous of the generations of which its replica is the first member.

    Args:
        address: IP address of this machine to listen on, at which the other members reach it.

    Attributes:
        shared: The store itself; the processes of this replica meet there, too.

    Raises:
        TransportError: The address cannot be listened on.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # Left to itself, torch listens on every address of the machine.
        listening = _listen(address)
        self.shared: Final = TCPStore(
            address,
            listening.getsockname()[1],
            None,
            is_master=True,
            timeout=timedelta(seconds=FORM_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.shared.port)

    @property
    def endpoint(self) -> str:
        """`tcp://HOST:PORT`, for `Hello.endpoints["store"]`."""
        return f"tcp://{in_url(self._address)}:{self.port}"


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {address} ({error.strerror or error}); set control.bind to an address of this machine"
        ) from error
