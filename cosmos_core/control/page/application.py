"""The page's routes, files and connections. Everything that comes in is bounded in size, number and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from cosmos_core.control.page import metrics
from cosmos_core.control.page.authentication import PageAuthentication
from cosmos_core.control.page.board import Board, as_event, changes, whole
from cosmos_core.control.page.samples import WRITE_S, SampleRoutes, refused
from cosmos_core.errors import TransportError
from cosmos_core.observe.samples import ASSETS, SCRIPT, STYLE
from cosmos_core.transport.http_connections import Connections
from cosmos_core.transport.messages import Drain, Request, Set, Stop
from cosmos_core.types.bounds import Word

MOST_BYTES: Final = 16_384
"""Of a request's body."""

_JUDGED: Final = frozenset({"rollout.sampling.temperature", "sync.max_staleness"})
"""Dynamic keys that algorithms are told of (`protocols.AlgorithmContext`), besides their own options."""
MOST_STREAMS: Final = 32
"""Browsers that watch at once."""
_BODY_S: Final = 5.0
_HEARTBEAT_S: Final = 5.0
MOST_CONNECTIONS: Final = 128
IDLE_S: Final = 15.0
"""How long a connection may be open without a whole request."""

SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob:; media-src 'self' blob:; base-uri 'none'; object-src 'none'; "
        "form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "cosmos",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_OWN: Final = Path(__file__).parent / "assets"
_PATHS: Final[Mapping[str, Path]] = {
    "/": _OWN / "page.html",
    **{f"/{name}": _OWN / name for name in ("page.css", "page.js", "charts.js", "stream.js", "icon.svg")},
    **{f"/{name}": ASSETS / name for name in (SCRIPT, STYLE)},
}

_Word = Annotated[Word, msgspec.Meta(min_length=1)]


class _Stop(msgspec.Struct, tag_field="do", tag="stop", forbid_unknown_fields=True, frozen=True):
    def request(self) -> Request:
        return Stop()


class _Drain(msgspec.Struct, tag_field="do", tag="drain", forbid_unknown_fields=True, frozen=True):
    name: _Word

    def request(self) -> Request:
        return Drain(name=self.name)


class _Set(msgspec.Struct, tag_field="do", tag="set", forbid_unknown_fields=True, frozen=True):
    overrides: Annotated[tuple[_Word, ...], msgspec.Meta(min_length=1, max_length=32)]

    def request(self) -> Request:
        return Set(overrides=self.overrides)


_DECODER: Final[msgspec.json.Decoder[_Stop | _Drain | _Set]] = msgspec.json.Decoder(_Stop | _Drain | _Set)


def request_from(body: bytes) -> Request:
    """The request that a body asks for.

    Such as `{"do": "drain", "name": "rollout-1"}` or `{"do": "set", "overrides": ["KEY=VALUE"]}`. A TransportError says
    why it is none, or that only plugins, which the controller has not, can judge its values.
    """
    try:
        request = _DECODER.decode(body).request()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"not a request of a run: {error}") from error
    overrides = request.overrides if isinstance(request, Set) else ()
    keys = [override.partition("=")[0].strip() for override in overrides]
    # What an algorithm could refuse later, on every policy replica, would be the end of the run.
    if judged := [key for key in keys if key in _JUDGED or ".options." in key]:
        raise TransportError(
            f"{', '.join(judged)}: only the run's algorithm can judge this, and the page cannot ask it; use "
            f"`cosmos set {' '.join(overrides)}`, which asks the plugins"
        )
    return request


def accept(server: web.Server) -> asyncio.BaseProtocol:
    """The protocol that handles a new connection."""
    return _Closing() if len(server.connections) >= MOST_CONNECTIONS else server()


class _Closing(asyncio.Protocol):
    """There are too many connections: this one ends at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


class Application:
    """Serves one run's board, and samples from its folder; `num_streams` counts browsers that watch."""

    def __init__(self, board: Board, authentication: PageAuthentication, directory: Path) -> None:
        self._board: Final = board
        self._authentication: Final = authentication
        self._samples: Final = SampleRoutes(directory)
        self._assets: Final = {path: file.read_bytes() for path, file in _PATHS.items()}
        self.num_streams = 0
        self.connections: Final = Connections()
        self._all_left: Final = asyncio.Event()
        self._all_left.set()

    def build(self) -> web.Application:
        """The aiohttp application."""
        application = web.Application(middlewares=[self._authenticated], client_max_size=MOST_BYTES)
        application.on_response_prepare.append(_harden)
        for path in self._assets:
            application.router.add_get(path, self._on_asset)
        application.router.add_get("/api/snapshot", self._on_snapshot)
        application.router.add_get("/api/events", self._on_events, allow_head=False)
        application.router.add_post("/api/requests", self._on_request)
        application.router.add_get("/metrics", self._on_metrics)
        self._samples.add_to(application.router)
        return application

    async def farewell(self, timeout_s: float) -> None:
        """Let those who watch see the end, which the board has told; waits at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_left.wait(), timeout_s)

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_data = request.path not in self._assets
        refusal = self._authentication.refusal(request.method, request.path, request.headers, is_data=is_data)
        if refusal is not None:
            return refused(refusal.status, refusal.reason)
        self.connections.begin(request.protocol)
        try:
            return await handler(request)
        except web.HTTPException as answer:
            return refused(answer.status, answer.reason, {"Allow": answer.headers.get("Allow", "")})
        finally:
            self.connections.end(request.protocol)

    async def _on_asset(self, request: web.Request) -> web.Response:
        media_type = _TYPES[_PATHS[request.path].suffix]
        return web.Response(body=self._assets[request.path], content_type=media_type, charset="utf-8")

    async def _on_snapshot(self, _request: web.Request) -> web.Response:
        if not self._board.parts:
            return refused(503, "there is nothing to see yet")
        return web.Response(body=whole(self._board.parts), content_type="application/json")

    async def _on_metrics(self, _request: web.Request) -> web.Response:
        snapshot = self._board.snapshot
        if snapshot is None:
            return refused(503, "there is nothing to see yet")
        text = metrics.render(snapshot, num_clients=self.num_streams)
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.MEDIA_TYPE})

    async def _on_request(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            return refused(415, "requests are JSON, not encoded (Content-Type: application/json)")
        try:
            body = await asyncio.wait_for(request.read(), _BODY_S)
        except TimeoutError:
            return refused(408, f"the request's body did not come within {_BODY_S:g} s")
        try:
            asked = request_from(body)
        except TransportError as error:
            return refused(422, str(error))
        try:
            refusal = await self._board.ask(asked)
        except TransportError as error:
            return refused(503, str(error))
        return refused(409, refusal) if refusal else web.json_response({"done": True})

    async def _on_events(self, request: web.Request) -> web.StreamResponse:
        if self.num_streams >= MOST_STREAMS:
            return refused(503, f"{MOST_STREAMS} browsers watch already; close one")
        self.num_streams += 1
        self._all_left.clear()
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            # A browser that is gone, or does not read what it gets, is let go: it can come again.
            with contextlib.suppress(ConnectionError, TimeoutError):
                await self._stream(request, response)
            return response
        finally:
            self.num_streams -= 1
            if not self.num_streams:
                self._all_left.set()

    async def _stream(self, request: web.Request, response: web.StreamResponse) -> None:
        board, known = self._board, dict[str, bytes]()
        await asyncio.wait_for(response.prepare(request), WRITE_S)
        while True:
            has_ended = board.has_ended
            parts = board.parts
            data = b"".join(as_event(name, part) for name, part in changes(parts, known))
            known = dict(parts)
            if data:
                await asyncio.wait_for(response.write(data), WRITE_S)
                continue
            if has_ended:
                await asyncio.wait_for(response.write(as_event("end", b"true")), WRITE_S)
                return
            await board.changed(_HEARTBEAT_S)
            if board.parts is parts:
                await asyncio.wait_for(response.write(b": still here\n\n"), WRITE_S)


async def _harden(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(SECURITY)
