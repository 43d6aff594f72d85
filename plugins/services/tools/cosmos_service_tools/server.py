"""An HTTP server of OpenAI's API: a model that answers, for a client or several at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket as sockets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import typer
from aiohttp import web

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ConfigError, CosmosError, DataError
from cosmos_core.types import Payload
from cosmos_service_tools.answers import Part, Speaker
from cosmos_service_tools.replies import Reply, error
from cosmos_service_tools.requests import Asked, ChatAsked, CompletionAsked, read

_MOST_BYTES: Final = 8 << 20
_MOST_ANSWERS: Final = 64
"""Answers that are being made at once; others wait."""
_COMPLETION_TOKENS: Final = 16
"""Of a completion that does not say, as OpenAI's; an answer in a chat may take what is left of the context."""
_FAILED: Final = 500
_SHUTDOWN_S: Final = 2.0
_LOG: Final = logging.getLogger(__name__)


def listen(host: str, port: int) -> sockets.socket:
    """A socket that listens; raises ConfigError if it cannot."""
    try:
        family = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0][0]
        return sockets.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"--host, --port: cannot listen at {host}:{port}: {error.strerror or error}") from error


def warn_of_strangers(host: str) -> None:
    """Say who may ask."""
    if not is_loopback(host):
        words = f"Warning: at {host} anybody who reaches the port may use the model; nobody is asked who they are."
        typer.echo(words, err=True)


def serve_speaker(speaker: Speaker, name: str, socket: sockets.socket) -> None:
    """Answer until Ctrl-C or SIGTERM."""
    host, port = socket.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"Serving {name} at http://{shown}:{port}/v1 (Ctrl-C ends it)", err=True)
    if speaker.why_plain:
        typer.echo(f"A chat of one turn is completed as plain text ({speaker.why_plain}).", err=True)
    threads = ThreadPoolExecutor(_MOST_ANSWERS, thread_name_prefix="answer")
    application = Service(speaker, name, threads, only_here=is_loopback(host)).application()
    try:
        web.run_app(
            application,
            sock=socket,
            print=None,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
        )
    finally:
        # What they wait for ends with the engine.
        threads.shutdown(wait=False, cancel_futures=True)


class Service:
    """Answers requests."""

    def __init__(self, speaker: Speaker, name: str, threads: ThreadPoolExecutor, *, only_here: bool) -> None:
        """Answer as the model `name`; `only_here` is of a server that other machines do not reach."""
        self._speaker: Final = speaker
        self._name: Final = name
        self._threads: Final = threads
        self._only_here: Final = only_here
        self._began: Final = int(time.time())

    def application(self) -> web.Application:
        """Its routes."""
        made = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._guarded])
        made.router.add_get("/v1/models", self._models)
        made.router.add_get("/health", self._health)
        made.router.add_post("/v1/completions", self._completions)
        made.router.add_post("/v1/chat/completions", self._chat)
        return made

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        # A page of another site may send a request here, by a name that leads here: neither is what it was opened for.
        if self._only_here and not is_loopback(request.url.host or ""):
            return _refused(403, f"the host {request.host!r} is not this machine's")
        if request.method == "POST" and request.content_type != "application/json":
            return _refused(415, "requests are JSON (Content-Type: application/json)")
        try:
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as refusal:
            return _refused(refusal.status, refusal.reason)
        except (ConfigError, DataError) as refusal:
            return _refused(400, str(refusal))
        except CosmosError as failure:
            _LOG.warning("a request failed: %s", failure)
            return _refused(_FAILED, str(failure))
        return response

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "created": self._began, "owned_by": "cosmos-core"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, read(await request.read(), CompletionAsked))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, read(await request.read(), ChatAsked))

    async def _answered(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.model not in ("", self._name):
            return _refused(404, f"the model {asked.model!r} is not served here, but {self._name!r}")
        prompts = [await self._in_thread(self._speaker.encode, prompt) for prompt in asked.prompts]
        reply = Reply(self._name, asked, sum(prompt.arrays["prompt"].shape[0] for prompt in prompts))
        answers = [
            self._parts(prompt, asked, asked.first_seed + index) for prompt in prompts for index in range(asked.n)
        ]
        if not asked.stream:
            return web.json_response(reply.whole(await asyncio.gather(*(_gathered(answer) for answer in answers))))
        if len(answers) > 1:
            raise DataError(f"stream: one answer at a time is streamed, and {len(answers)} are asked for")
        return await self._streamed(request, reply, answers[0], with_usage=asked.stream_options.include_usage)

    async def _parts(self, prompt: Payload, asked: Asked, seed: int) -> AsyncIterator[Part]:
        """An answer, each part made on a thread."""
        most = self._speaker.context_length if isinstance(asked, ChatAsked) else _COMPLETION_TOKENS
        parts = self._speaker.answer(prompt, asked.sampling(most), seed, asked.stops)
        while (part := await self._in_thread(next, parts, None)) is not None:
            yield part

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _streamed(
        self, request: web.Request, reply: Reply, answer: AsyncIterator[Part], *, with_usage: bool
    ) -> web.StreamResponse:
        """Server-sent events. The first part is made before they begin, so that what cannot be answered is refused."""
        part = await anext(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        # A client may leave before the end.
        with contextlib.suppress(ConnectionResetError):
            try:
                await _send(response, reply.part(part, is_first=True))
                async for part in answer:
                    await _send(response, reply.part(part, is_first=False))
                if with_usage:
                    await _send(response, reply.usage(part))
                await response.write(b"data: [DONE]\n\n")
            except CosmosError as failure:
                await _send(response, error(str(failure), _FAILED))
        return response


async def _gathered(answer: AsyncIterator[Part]) -> list[Part]:
    return [part async for part in answer]


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: %s\n\n" % json.dumps(event).encode())


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response(error(reason, status), status=status)
