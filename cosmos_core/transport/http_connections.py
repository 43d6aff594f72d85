"""Ends HTTP connections that are quiet for too long: those of clients that send nothing, or read nothing."""

from __future__ import annotations

import math
import time

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class Connections:
    """The connections of a server, and since when each has been quiet: not while a request of it is being served."""

    def __init__(self) -> None:
        self._quiet_since: dict[RequestHandler, float] = {}
        self._unread: dict[RequestHandler, int] = {}

    def begin(self, connection: RequestHandler) -> None:
        """A request of it is being served from now on."""
        self._quiet_since[connection] = math.inf

    def end(self, connection: RequestHandler) -> None:
        """It was served."""
        self._quiet_since[connection] = time.monotonic()

    def sweep(self, server: web.Server, now: float, idle_s: float) -> None:
        """Close what has been quiet for longer than `idle_s` at `now`, a monotonic time."""
        self._quiet_since = {each: self._quiet_since.get(each, now) for each in server.connections}
        known, self._unread = self._unread, {}
        for connection, since in self._quiet_since.items():
            if (transport := connection.transport) is not None:
                self._unread[connection] = unread = transport.get_write_buffer_size()
                if unread < known.get(connection, 0):  # an answer is being read
                    self._quiet_since[connection] = max(since, now)
                elif now - since > idle_s:
                    transport.abort()  # to close it would wait for whoever does not read
