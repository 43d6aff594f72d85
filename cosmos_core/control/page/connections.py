"""Connections to the page: only so many, and none that stays open without saying anything whole."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MOST_CONNECTIONS: Final = 128
IDLE_S: Final = 15.0
"""How long a connection may be open without a whole request."""


class Activity:
    """Since when each connection has been quiet; not while a request of it is being served."""

    def __init__(self) -> None:
        self._quiet_since: dict[RequestHandler, float] = {}

    def begin(self, connection: RequestHandler) -> None:
        """A request of it is being served from now on."""
        self._quiet_since[connection] = math.inf

    def end(self, connection: RequestHandler) -> None:
        """It was served."""
        self._quiet_since[connection] = time.monotonic()

    def quiet(self, connections: Collection[RequestHandler], now: float) -> list[RequestHandler]:
        """Those that have been quiet for too long; all that are not in `connections` are forgotten."""
        self._quiet_since = {connection: self._quiet_since.get(connection, now) for connection in connections}
        return [connection for connection, since in self._quiet_since.items() if now - since > IDLE_S]


class Connections:
    """Accepts connections for a server, and closes those that wait for nothing.

    Args:
        server: Handles their requests.
        activity: What they do; the server's application keeps it true.
    """

    def __init__(self, server: web.Server, activity: Activity) -> None:
        self._server: Final = server
        self._activity: Final = activity

    def accept(self) -> asyncio.BaseProtocol:
        """What handles a new connection."""
        return _Closing() if len(self._server.connections) >= MOST_CONNECTIONS else self._server()

    def sweep(self, now: float) -> None:
        """Close what has been quiet for too long at `now`, a monotonic time."""
        for connection in self._activity.quiet(self._server.connections, now):
            connection.force_close()


class _Closing(asyncio.Protocol):
    """There are too many connections: this one ends at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()
