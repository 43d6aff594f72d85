"""The page as the controller sees it: something to offer snapshots to, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Final

from aiohttp import web

from cosmos_core.control.page.application import IDLE_S, Application, accept
from cosmos_core.control.page.authentication import NAME, PageAuthentication, run_token
from cosmos_core.control.page.board import Board
from cosmos_core.errors import TransportError

_LOG: Final = logging.getLogger(__name__)
_QUIET: Final = logging.getLogger(f"{__name__}.http")
_SWEEP_S: Final = 2.0
_END_S: Final = 2.0
_BACKLOG: Final = 64


class Page:
    """A page that is listening; `start` serves it.

    The token is kept in `directory`, the run's. Where `port` is 0 any free one is taken, `preferred` if it is free.
    """

    def __init__(self, directory: Path, bind: str, port: int, preferred: int = 0) -> None:
        self._directory: Final = directory
        token = run_token(directory)
        self.token_file: Final = directory / NAME
        self._socket: Final = _listening(bind, port, preferred)
        host, bound = self._socket.getsockname()[:2]
        self.address: Final = f"http://[{host}]:{bound}/" if ":" in host else f"http://{host}:{bound}/"
        self.board: Final = Board()
        names = frozenset(name.lower() for name in (bind, socket.gethostname()))
        self._authentication: Final = PageAuthentication(token=token, bind=bind, names=names)
        self._thread: Final = threading.Thread(target=self._main, name="page", daemon=True)

    def start(self) -> None:
        """Serve on a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Show the last snapshot to those who watch, and end."""
        self.board.end()
        if self._thread.ident is not None:
            self._thread.join(_END_S + 3.0)
        self._socket.close()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 - the supervised boundary of this thread: a run does without its page
            _LOG.exception("the page at %s has failed; the run goes on without it", self.address)

    async def _serve(self) -> None:
        _QUIET.setLevel(logging.CRITICAL)  # whoever sends nonsense shall not fill the log
        self.board.open()
        application = Application(self.board, self._authentication, self._directory)
        runner = web.AppRunner(
            application.build(),
            access_log=None,
            logger=_QUIET,
            handle_signals=False,
            keepalive_timeout=IDLE_S,
            lingering_time=1.0,
            auto_decompress=False,
            shutdown_timeout=_END_S,
        )
        await runner.setup()
        try:
            server = runner.server
            assert server is not None
            loop = asyncio.get_running_loop()
            async with await loop.create_server(lambda: accept(server), sock=self._socket, backlog=_BACKLOG):
                while not self.board.has_ended:
                    await self.board.changed(_SWEEP_S)
                    application.connections.sweep(server, time.monotonic(), IDLE_S)
            await application.farewell(_END_S)
        finally:
            await runner.cleanup()


def _listening(bind: str, port: int, preferred: int) -> socket.socket:
    try:
        ((family, *_rest), *_others) = socket.getaddrinfo(bind, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"control.page_bind: {bind!r} is no address of this machine: {error}") from error
    problem: OSError | None = None
    for attempt in (port,) if port or not preferred else (preferred, 0):
        try:
            return socket.create_server((bind, attempt), family=family, backlog=_BACKLOG)
        except OSError as error:
            problem = error
    raise TransportError(f"the page cannot listen on {bind}:{port} (control.page_port): {problem}") from problem
