"""The HTTP of a service: who may ask, what is refused and how, and what is answered."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

from aiohttp import hdrs, web

from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.transport.http_connections import Connections
from cosmos_core.types import JSON
from cosmos_service_reward_service.bodies import Submission, read_body
from cosmos_service_reward_service.cosmos_rl import PATHS, pulled, read_foreign
from cosmos_service_reward_service.ledger import Entry
from cosmos_service_reward_service.metrics import CONTENT_TYPE
from cosmos_service_reward_service.service import Service
from cosmos_service_reward_service.settings import SERVED_KINDS, unknown_scorers

ENQUEUE: Final = "/v1/enqueue"
FETCH: Final = "/v1/fetch"
_LONGEST_KEY: Final = 255
_LONGEST_FORM: Final = 1 << 16

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read: TypeAlias = Callable[..., Submission]


class _RefusedError(Exception):
    """A request that is answered with a status other than 200 and 202."""

    def __init__(self, status: int, what: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.headers = headers or {}


class Application:
    """Handlers of a service.

    Args:
        service: What they are of.
        token: What requests must bring.

    Attributes:
        connections: Of its server, and since when no request of each is served.
    """

    def __init__(self, service: Service, token: str) -> None:
        self._service: Final = service
        self.connections: Final = Connections()
        self._bearer: Final = f"Bearer {token}".encode()
        # A body is held several times over while it is read, so one is at a time; also if who sent it hangs up.
        self._reader: Final = ThreadPoolExecutor(1, thread_name_prefix="reward-body")

    def made(self) -> web.Application:
        """Make the application that aiohttp serves."""
        app = web.Application(middlewares=[self._answered], client_max_size=self._service.settings.body_mb << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(ENQUEUE, self._scorers)
        app.router.add_post(ENQUEUE, self._enqueue)
        app.router.add_get(FETCH, self._fetch)
        app.router.add_post(PATHS["ping"], self._ping)
        app.router.add_post(PATHS["enqueue"], self._enqueue_foreign)
        app.router.add_post(PATHS["pull"], self._pull)
        return app

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self.connections.begin(request.protocol)
        try:
            if path != "/health":
                self._check_token(request)
            _check_encoding(request)
            answer = await handler(request)
        except _RefusedError as error:
            # Clients of cosmos-rl look for `message`.
            said = {"error": str(error)} if not path.startswith("/api/") else {"message": str(error)}
            answer = web.json_response(said, status=error.status, headers=error.headers)
        except web.HTTPException as error:
            headers = {name: error.headers[name] for name in (hdrs.ALLOW,) if name in error.headers}
            answer = web.json_response({"error": error.text or error.reason}, status=error.status, headers=headers)
        finally:
            self.connections.end(request.protocol)
        self._service.figures.answers[path, answer.status] += 1
        return answer

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get(hdrs.AUTHORIZATION, "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._bearer):
            raise _RefusedError(401, "the token is missing or another one", {hdrs.WWW_AUTHENTICATE: "Bearer"})

    async def _health(self, _: web.Request) -> web.Response:
        health = self._service.health()
        return web.json_response(health, status=503 if self._service.is_stopping else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._service.metrics(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def _scorers(self, request: web.Request) -> web.Response:
        """The scorers that requests may name; refuses those that a request would be refused for."""
        self._check_open()
        asked, kinds = tuple(request.query.getall("scorer", ())), self._service.kinds
        kind = request.query.get("kind", "")
        if asked and kind not in SERVED_KINDS:
            raise _RefusedError(400, f"kind: expected {' or '.join(sorted(SERVED_KINDS))}, got {kind!r:.100}")
        self._check_scorers(asked, kind)
        return web.json_response({"scorers": {name: sorted(scores) for name, scores in kinds.items()}})

    async def _enqueue(self, request: web.Request) -> web.Response:
        entry = await self._take(request, read_body)
        status = "pending" if entry.results is None else "done"
        return web.json_response({"id": entry.ticket, "status": status}, status=202)

    async def _enqueue_foreign(self, request: web.Request) -> web.Response:
        entry = await self._take(request, read_foreign)
        return web.json_response({"uuid": entry.ticket})

    async def _fetch(self, request: web.Request) -> web.Response:
        ticket = request.query.get("id", "")
        state, entry = await self._service.find(ticket, self._wait_s(request))
        if state == "done" and entry is not None:
            return web.json_response(_answer(entry))
        if state == "pending":
            return web.json_response({"id": ticket, "status": state}, status=202)
        raise _missing(state, ticket)

    async def _pull(self, request: web.Request) -> web.Response:
        if request.content_length is None or request.content_length > _LONGEST_FORM:
            raise _RefusedError(413, f"a form of {request.content_length} bytes, and it may have {_LONGEST_FORM}")
        try:
            async with asyncio.timeout(self._service.settings.upload_s):
                form = await request.post()
        except TimeoutError:
            raise self._late() from None
        except (ValueError, LookupError) as error:  # in an encoding that is none, or is another one
            raise _RefusedError(400, f"not a form: {error}") from None
        ticket, scorer = str(form.get("uuid", "")), str(form.get("type", ""))
        state, entry = await self._service.find(ticket, 0.0)
        if state == "pending":
            raise _RefusedError(400, f"Not found scores for {ticket!r:.100}")
        if entry is None or entry.results is None:
            raise _missing(state, ticket)
        if scorer not in entry.results:
            raise _RefusedError(404, f"type: {scorer!r:.100} was not asked; asked were {', '.join(entry.results)}")
        answer, failure = pulled(entry, scorer)
        if failure:
            raise _RefusedError(500, failure)
        return web.json_response(answer)

    async def _ping(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "Ping request received"})

    async def _take(self, request: web.Request, read: Read) -> Entry:
        """Take a request on; or find that it has been."""
        service = self._service
        key = request.headers.get("Idempotency-Key", "")
        if len(key) > _LONGEST_KEY:
            raise _RefusedError(400, f"Idempotency-Key: {len(key)} characters, and it may have {_LONGEST_KEY}")
        size_bytes = self._size_bytes(request)
        self._check_open()
        if not service.capacity.take(size_bytes):
            raise self._full()
        is_taken = False
        try:
            data = await self._body(request)
            digest = await asyncio.to_thread(_digest, request.path, data)
            entry = self._repeated(key, digest)
            if entry is None:
                submission = await self._read(data, read)
                size_bytes = self._grown(size_bytes, submission.size_bytes)
                # Another request with this key may have come meanwhile.
                entry = self._repeated(key, digest)
                if entry is None:
                    self._check_open()
                    entry = service.submit(submission, digest=digest, key=key, size_bytes=size_bytes)
                    is_taken = True
        finally:
            if not is_taken:
                service.capacity.give(size_bytes)
        return entry

    def _grown(self, size_bytes: int, held_bytes: int) -> int:
        """The bytes that a request takes whose arrays are held so: of 16-bit latents, twice what they came as."""
        most = self._service.settings.queue_mb << 20
        if held_bytes > most:
            raise _RefusedError(413, f"latents of {held_bytes} bytes as float32, and all may have {most} (queue_mb)")
        if held_bytes > size_bytes and not self._service.capacity.grow(held_bytes - size_bytes):
            raise self._full()
        return max(size_bytes, held_bytes)

    def _full(self) -> _RefusedError:
        settings, capacity = self._service.settings, self._service.capacity
        return _RefusedError(
            429,
            f"the queue is full: {capacity.num_requests} requests of {settings.queue} and "
            f"{capacity.held_bytes >> 20} MB of {settings.queue_mb} MB",
            {hdrs.RETRY_AFTER: str(settings.retry_after_s)},
        )

    def _check_open(self) -> None:
        if self._service.is_stopping:
            after = str(self._service.settings.retry_after_s)
            raise _RefusedError(503, "the service is stopping", {hdrs.RETRY_AFTER: after})

    def _size_bytes(self, request: web.Request) -> int:
        most = self._service.settings.body_mb << 20
        size_bytes = most if request.content_length is None else request.content_length
        if size_bytes > most:
            raise _RefusedError(413, f"a body of {size_bytes} bytes, and it may have {most} (body_mb)")
        return size_bytes

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._service.settings.upload_s):
                return await request.read()
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> _RefusedError:
        return _RefusedError(408, f"the body did not come within {self._service.settings.upload_s:g} s (upload_s)")

    def _repeated(self, key: str, digest: str) -> Entry | None:
        entry = self._service.known(key)
        if entry is not None and entry.digest != digest:
            raise _RefusedError(422, "Idempotency-Key: it came with another body before; take a new key")
        return entry

    async def _read(self, data: bytes, read: Read) -> Submission:
        try:
            reading = functools.partial(read, data, most=self._service.settings.batch)
            submission = await asyncio.get_running_loop().run_in_executor(self._reader, reading)
        except (ValueError, OverflowError, RecursionError) as error:
            raise _RefusedError(400, str(error)) from None
        self._check_scorers(submission.scorers, submission.kind)
        return submission

    def _check_scorers(self, names: tuple[str, ...], kind: str) -> None:
        if problem := unknown_scorers(names, self._service.kinds, kind):
            raise _RefusedError(400, problem)

    def _wait_s(self, request: web.Request) -> float:
        given = request.query.get("wait_s", "0")
        try:
            wait_s = float(given)
        except ValueError:
            wait_s = -1.0
        if not 0.0 <= wait_s < float("inf"):
            raise _RefusedError(400, f"wait_s: expected seconds, got {given!r:.100}")
        return min(wait_s, self._service.settings.wait_s)


def _check_encoding(request: web.Request) -> None:
    """A packed body is refused: its length does not tell its size."""
    for encoding in request.headers.getall(hdrs.CONTENT_ENCODING, ()):
        if encoding.strip().lower() not in ("", "identity"):
            raise _RefusedError(415, f"Content-Encoding: {encoding!r:.100}; send the body as it is")


def _missing(state: str, ticket: str) -> _RefusedError:
    if state == "expired":
        return _RefusedError(410, f"the result of {ticket!r:.100} has expired")
    return _RefusedError(404, f"no request {ticket!r:.100} is known")


def _answer(entry: Entry) -> dict[str, Any]:
    """The answer to a request: for each scorer and completion its value, or why there is none."""
    assert entry.results is not None
    scores = {name: [_score(each) for each in row] for name, row in entry.results.items()}
    return {"id": entry.ticket, "status": "done", "scores": scores}


def _score(outcome: Outcome) -> dict[str, JSON]:
    if outcome.value is None:
        return {"error": outcome.detail, "status": outcome.status.value}
    return {"value": outcome.value, "detail": outcome.detail}


def _digest(path: str, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16, person=path.encode()[:16]).hexdigest()
