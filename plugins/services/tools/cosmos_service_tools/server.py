"""An HTTP server of OpenAI's API: a model that answers, for a client or several at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket as sockets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final

import attrs
import msgspec
import typer
from aiohttp import web

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ConfigError, CosmosError, DataError
from cosmos_core.protocols import Sampling
from cosmos_core.rollout.endpoint import replies, requests
from cosmos_core.rollout.endpoint.calls import Call, CallError, Choice, Reply
from cosmos_core.rollout.endpoint.server import LARGEST_BODY, Api
from cosmos_core.types import Message, Payload
from cosmos_service_tools.answers import Part, Read, Speaker

_MOST_ANSWERS: Final = 64
"""Answers that are being made at once; others wait."""
_MOST_PROMPTS: Final = 16
_COMPLETION_TOKENS: Final = 16
"""Of a completion that does not say, as OpenAI's; an answer in a chat may take what is left of the context."""
_COMPLETION_DEFAULTS: Final = {"best_of": 1, "echo": False, "suffix": "", "logprobs": 0}
_NOTHING: Final = Message(role="assistant", content="")
_SHUTDOWN_S: Final = 2.0


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


class _Drawn(msgspec.Struct):
    """How the replies to a request are drawn, each with the next seed."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0
    seed: int = msgspec.field(default_factory=lambda: secrets.randbits(32))


@attrs.frozen(kw_only=True, eq=False)
class _Asked:
    """A call, its prompt, and how replies to it are drawn, read and told."""

    call: Call
    prompt: Payload
    sampling: Sampling
    seed: int
    read: Read
    told: Callable[[Mapping[str, Any]], dict[str, Any]]


class Service(Api):
    """Answers requests by a model, and knows no sessions."""

    def __init__(self, speaker: Speaker, name: str, threads: ThreadPoolExecutor, *, only_here: bool) -> None:
        """Answer as the model `name`; `only_here` is of a server that other machines do not reach."""
        self.names = (name,)
        self._name: Final = name
        self._speaker: Final = speaker
        self._threads: Final = threads
        self._only_here: Final = only_here

    def application(self) -> web.Application:
        """The routes, with what comes before each of them."""
        made = web.Application(client_max_size=LARGEST_BODY, middlewares=[self.guarded, self._checked])
        more = [web.get("/health", self._health), web.post("/v1/completions", self._completions)]
        made.add_routes([*self.routes(), *more])
        return made

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        # A page of another site may send a request here, by a name that leads here: neither is what it was opened for.
        if self._only_here and not is_loopback(request.url.host or ""):
            raise CallError(403, f"the host {request.host!r} is not this machine's")
        if request.method == "POST" and request.content_type != "application/json":
            raise CallError(415, "requests are JSON (Content-Type: application/json)")
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def answer(self, request: web.Request, call: Call) -> Reply:
        """Answer a call."""
        return await self._reply([await self._asked(request, call)])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat; one reply is streamed as it is made, unless it may be a call of a tool."""
        body = requests.read_body(await request.read())
        wanted, call = requests.streaming(body), requests.read_chat(body)
        if not wanted.stream or call.tools or call.num_choices > 1 or call.with_logprobs:
            return await super().chat(request)
        return await self._streamed(request, await self._asked(request, call), with_usage=wanted.include_usage)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = requests.read_body(await request.read())
        wanted, calls = requests.streaming(body), _completion_calls(body)
        asked = [await self._asked(request, call, is_text=True) for call in calls]
        if not wanted.stream:
            return web.json_response(_as_text(replies.chat(await self._reply(asked))))
        if (number := sum(call.num_choices for call in calls)) > 1:
            words = f"stream: one completion at a time is streamed, and {number} are asked for"
            raise CallError(400, words, param="stream")
        return await self._streamed(request, asked[0], with_usage=wanted.include_usage)

    async def _asked(self, request: web.Request, call: Call, *, is_text: bool = False) -> _Asked:
        """A call that is encoded; one of text has it as the only message."""
        if call.model not in ("", *self.names):
            words = f"the model {call.model!r:.80} is not served here, but {self._name!r}"
            raise CallError(404, words, code="model_not_found", param="model")
        if call.previous:
            words = "previous_response_id: replies are not kept here; send the whole history"
            raise CallError(400, words, param="previous_response_id")
        drawn, messages = _drawn(requests.read_body(await request.read())), call.history(())
        text = messages[0].content if is_text else messages
        try:
            prompt = await self._in_thread(self._speaker.encode, text, call.tools)
            room = self._speaker.room(prompt)
        except (ConfigError, DataError) as error:
            raise CallError(400, str(error), param="prompt" if is_text else "messages") from error
        most = call.max_units or (_COMPLETION_TOKENS if is_text else room)
        sampling = Sampling(temperature=drawn.temperature, top_p=drawn.top_p, top_k=drawn.top_k, max_units=most)
        read, told = functools.partial(self._speaker.read, call, text), _as_text if is_text else dict
        return _Asked(call=call, prompt=prompt, sampling=sampling, seed=drawn.seed, read=read, told=told)

    async def _reply(self, asked: Sequence[_Asked]) -> Reply:
        """All replies to calls, as one."""
        made = [self._choice(each, index) for each in asked for index in range(each.call.num_choices)]
        return self._begun(asked, await asyncio.gather(*made))

    def _begun(self, asked: Sequence[_Asked], choices: Sequence[Choice] = ()) -> Reply:
        given = sum(each.prompt.arrays["prompt"].shape[0] for each in asked)
        return Reply(
            id=secrets.token_hex(12),
            model=self._name,
            created=int(time.time()),
            choices=tuple(choices),
            num_prompt_units=given,
        )

    async def _choice(self, asked: _Asked, index: int) -> Choice:
        async for part in self._parts(asked, index):
            made = part
        message = await self._in_thread(asked.read, made.ids)
        told = enumerate(made.logprobs.tolist() if asked.call.with_logprobs else ())
        return Choice(
            message=message,
            reason="tool_calls" if message.tool_calls else made.reason,
            num_units=len(made.ids),
            logprobs=[(self._speaker.decode(made.ids[place : place + 1]), value) for place, value in told],
        )

    async def _streamed(self, request: web.Request, asked: _Asked, *, with_usage: bool) -> web.StreamResponse:
        """Send a reply as it is made. The first part is there before it begins: what cannot be answered is refused."""
        reply, delta = self._begun([asked]), {"role": "assistant"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with contextlib.suppress(ConnectionResetError):  # a client may leave before the end
            try:
                async for part in self._parts(asked):
                    await response.prepare(request)
                    delta |= {"content": part.text} | ({"reasoning_content": part.reasoning} if part.reasoning else {})
                    told = asked.told(replies.chunk(reply, delta, reason=part.reason or None))
                    await response.write(replies.event(told))
                    delta = {}
                if with_usage:
                    last = Choice(message=_NOTHING, reason=part.reason, num_units=len(part.ids))
                    told = asked.told(replies.usage_chunk(attrs.evolve(reply, choices=(last,))))
                    await response.write(replies.event(told))
                await response.write(replies.DONE)
            except CosmosError as failure:
                if not response.prepared:
                    raise
                await response.write(replies.event(CallError(500, str(failure)).body()))
        return response

    async def _parts(self, asked: _Asked, index: int = 0) -> AsyncIterator[Part]:
        """An answer, each part made on a thread."""
        seed = asked.seed + index
        parts = self._speaker.answer(asked.prompt, asked.sampling, seed, asked.call.stops, asked.read)
        while (part := await self._in_thread(next, parts, None)) is not None:
            yield part

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _completion_calls(body: Mapping[str, Any]) -> list[Call]:
    """The calls of a body of `/v1/completions`, one for each of its prompts."""
    told = {key: value for key, value in body.items() if value != _COMPLETION_DEFAULTS.get(key, _NOTHING)}
    given = told.pop("prompt", None)
    prompts = given if isinstance(given, list) else [given]
    if not 0 < len(prompts) <= _MOST_PROMPTS or not all(isinstance(each, str) for each in prompts):
        raise CallError(400, f"prompt: {given!r:.80}; give a text, or a list of up to {_MOST_PROMPTS}", param="prompt")
    return [requests.read_chat({**told, "messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]


def _drawn(body: Mapping[str, Any]) -> _Drawn:
    given = {key: value for key, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, _Drawn)
    except msgspec.ValidationError as error:
        raise CallError(400, f"the request cannot be read: {error}") from error


def _as_text(told: Mapping[str, Any]) -> dict[str, Any]:
    """A reply to a chat, or a part of one, as that of `/v1/completions`."""
    choices = [
        {
            "index": choice["index"],
            "text": (choice.get("message") or choice["delta"])["content"],
            "finish_reason": choice["finish_reason"],
            "logprobs": None,
        }
        for choice in told["choices"]
    ]
    return {**told, "id": told["id"].removeprefix("chat"), "object": "text_completion", "choices": choices}
