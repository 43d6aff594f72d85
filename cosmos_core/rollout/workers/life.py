"""The life of a worker process: it serves over an inherited socket and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol

from cosmos_core.errors import CosmosError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.transport.bounds import DETAIL, sendable


class Worker(Protocol):
    """What a worker process runs."""

    async def serve(self) -> None:
        """Serve until the other side closes.

        Raises:
            CosmosError: What it serves cannot be loaded.
        """
        ...

    def send_broken(self, reason: str) -> None:
        """Say why this worker ends."""
        ...


def live(make: Callable[[socket.socket], Worker]) -> None:
    """Serve over the socket whose descriptor is the first argument of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.setblocking(False)
        worker = make(connection)
        try:
            asyncio.run(worker.serve())
        except CosmosError as error:
            worker.send_broken(str(error))
        except ConnectionError:
            return  # the replica is gone


def described(error: BaseException) -> str:
    """An error of a plugin, as people are told of it."""
    return shown(f"{type(error).__name__}: {error}")


def shown(text: str) -> str:
    """The beginning of a text, fit for a message."""
    return sendable(text[:DETAIL])
