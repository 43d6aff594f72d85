"""The routes of OpenAI's API, and the HTTP server of a rollout replica, at which agents call the model for sessions.

A session is named by the path (`/s/SESSION/v1/…`), else by the header `X-Session`, else by the API key. Its name is a
secret of 128 bits: whoever knows it may call for it, tell its reward, and nothing else.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import socket as sockets
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, Protocol

from aiohttp import web

from cosmos_core.errors import ReplicaError
from cosmos_core.rollout.endpoint import replies, requests
from cosmos_core.rollout.endpoint.calls import Call, CallError, Reply
from cosmos_core.threads import SupervisedThread

LARGEST_BODY: Final = 32 << 20
"""Bytes of a request; images in it are base64."""
_LOG: Final = logging.getLogger(__name__)
_START_S: Final = 10.0


class Sessions(Protocol):
    """Answers calls for sessions; any thread may ask."""

    @property
    def names(self) -> Iterable[str]:
        """The names under which the model is served."""

    def call(self, session: str, call: Call) -> Future[Reply]:
        """Answer a call; the future may raise CallError. To cancel it ends what is being generated."""

    def reward(self, session: str, value: Any, reply: Any) -> Future[None]:
        """Take the reward of a session, or of one of its replies by its id; the future may raise CallError."""

    def refused(self) -> None:
        """Count a request that was refused."""


class Api(abc.ABC):
    """Routes of chats and responses; a subclass answers the calls, and may add routes.

    Attributes:
        names: The names under which the model is served.
    """

    names: Iterable[str]

    @abc.abstractmethod
    async def answer(self, request: web.Request, call: Call) -> Reply:
        """Answer the call of a request; raises CallError. Cancelled, it ends what is being generated."""

    def refused(self) -> None:  # noqa: B027 - it need not be counted
        """Take note of a request that was refused."""

    def routes(self, prefix: str = "") -> list[web.RouteDef]:
        """The routes, each under a prefix."""
        return [
            web.get(f"{prefix}/v1/models", self._models),
            web.get(f"{prefix}/v1/models/{{model}}", self._model),
            web.post(f"{prefix}/v1/chat/completions", self.chat),
            web.post(f"{prefix}/v1/responses", self._response),
        ]

    @web.middleware
    async def guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse in OpenAI's words what a handler raises."""
        try:
            return await handler(request)
        except web.HTTPException as refusal:
            words = f"{request.method} {request.path}: {refusal.reason}"
            if isinstance(refusal, web.HTTPRequestEntityTooLarge):
                words = f"the body has more than {LARGEST_BODY} bytes; send less"
            error = CallError(refusal.status, words)
        except CallError as refusal:
            error = refusal
        except Exception as failure:  # noqa: BLE001 - one request's, whatever it is: all others go on
            _LOG.exception("a request failed")
            error = CallError(500, f"the request failed: {type(failure).__name__}: {failure}")
        self.refused()
        return web.json_response(error.body(), status=error.status)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_described(name) for name in self.names]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self.names:
            raise CallError(404, f"the model {name!r:.80} is not served", code="model_not_found", param="model")
        return web.json_response(_described(name))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        body = requests.read_body(await request.read())
        wanted, reply = requests.streaming(body), await self.answer(request, requests.read_chat(body))
        if not wanted.stream:
            return web.json_response(replies.chat(reply))
        return await _streamed(request, replies.chat_events(reply, with_usage=wanted.include_usage))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        body = requests.read_body(await request.read())
        wanted, reply = requests.streaming(body), await self.answer(request, requests.read_response(body))
        if not wanted.stream:
            return web.json_response(replies.response(reply, body))
        return await _streamed(request, replies.response_events(reply, body))


class Endpoint(Api):
    """Serves sessions on a thread of its own.

    Attributes:
        url: Where it listens, such as `http://127.0.0.1:8001`, once it has started.
    """

    def __init__(self, sessions: Sessions, host: str) -> None:
        self.names = sessions.names
        self._sessions: Final = sessions
        self._host: Final = host
        self._thread: Final = SupervisedThread("endpoint", self._run)
        self._loop: Final = asyncio.new_event_loop()
        self._stopped: Final = asyncio.Event()
        self._started: Final = threading.Event()
        self.url = ""

    def start(self) -> None:
        """Begin to listen.

        Raises:
            ReplicaError: It cannot listen there.
        """
        try:
            family = sockets.getaddrinfo(self._host, 0, type=sockets.SOCK_STREAM)[0][0]
            self._socket = sockets.create_server((self._host, 0), family=family, backlog=4096)
        except OSError as error:
            raise ReplicaError(
                f"environment.agent.host: cannot listen at {self._host}: {error.strerror or error}"
            ) from error
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._thread.start()
        if not self._started.wait(_START_S):
            self._thread.check()
            raise ReplicaError(f"the endpoint for agents did not start within {_START_S:g} s")

    def close(self) -> None:
        """Stop; calls that wait for a reply are dropped. Idempotent."""
        if self._started.is_set():
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_START_S)

    def check(self) -> None:
        """Raise ReplicaError if it failed."""
        self._thread.check()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        application = web.Application(client_max_size=LARGEST_BODY, middlewares=[self.guarded])
        application.add_routes([*self.routes(), *self.routes("/s/{session}")])
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            self._started.set()
            await self._stopped.wait()
        finally:
            await runner.cleanup()

    async def answer(self, request: web.Request, call: Call) -> Reply:
        """Answer a call for the session that the request names."""
        return await asyncio.wrap_future(self._sessions.call(session_of(request), call))

    def refused(self) -> None:
        """Count a request that was refused."""
        self._sessions.refused()

    def routes(self, prefix: str = "") -> list[web.RouteDef]:
        """The routes, and those of rewards."""
        rewards = [web.post(f"{prefix}{path}", self._reward) for path in ("/reward", "/v1/reward")]
        return [*super().routes(prefix), *rewards]

    async def _reward(self, request: web.Request) -> web.Response:
        body = requests.read_body(await request.read())
        given = {name: body.get(name) for name in ("reward", "reply")}
        await asyncio.wrap_future(self._sessions.reward(session_of(request), *given.values()))
        return web.json_response(given)


def _described(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "cosmos-core"}


def session_of(request: web.Request) -> str:
    """The session that a request names; empty if it names none."""
    key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return request.match_info.get("session") or request.headers.get("X-Session") or key


async def _streamed(request: web.Request, events: Iterable[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):  # a client may leave before the end
        for event in events:
            await response.write(event)
    return response
