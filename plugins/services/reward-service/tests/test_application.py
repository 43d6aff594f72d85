"""The HTTP of a service, without scorers: what is refused before it is read, and what is taken on for what is held."""

import asyncio
import gzip
import io
import json
import types

import aiohttp
import numpy as np
from aiohttp import web

from cosmos_service_reward_service import application
from cosmos_service_reward_service.application import Application
from cosmos_service_reward_service.capacity import Capacity
from cosmos_service_reward_service.ledger import Entry
from cosmos_service_reward_service.metrics import Figures

HEADERS = {"Authorization": "Bearer token"}


class Taken:
    """What a service is to its HTTP; it takes everything on and scores nothing."""

    def __init__(self, queue_mb):
        limits = {"body_mb": 1, "queue": 9, "queue_mb": queue_mb, "batch": 4, "upload_s": 9.0, "retry_after_s": 1}
        self.settings = types.SimpleNamespace(**limits, wait_s=1.0)
        self.capacity = Capacity(9, queue_mb << 20)
        self.figures, self.kinds, self.is_stopping = Figures(), {"a": frozenset({"media", "latents"})}, False

    def known(self, key):
        return None

    def submit(self, submission, *, digest, key, size_bytes):
        return Entry(ticket="t", digest=digest, key=key, since=0.0, about=submission.about)


def answers(service, *requests):
    """Status and text of the answer to each request: path, body (None: it is a GET), headers."""

    async def ask():
        runner = web.AppRunner(Application(service, "token").made(), access_log=None, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url, found = f"http://127.0.0.1:{runner.addresses[0][1]}", []
        async with aiohttp.ClientSession(headers=HEADERS) as session:
            for path, data, headers in requests:
                method = "GET" if data is None else "POST"
                async with session.request(method, url + path, data=data, headers=headers) as answer:
                    found.append((answer.status, await answer.text()))
        await runner.cleanup()
        return found

    return asyncio.run(ask())


def latents(number, **fields):
    """A body of so many float16 latents, 64 KiB each."""
    line = {"version": 1, "kind": "latents", "scorers": ["a"], "completions": [{"prompt": "p", **fields}] * number}
    file = io.BytesIO()
    np.save(file, np.zeros((number, 16, 2, 32, 32), np.float16))
    return json.dumps(line).encode() + b"\n" + file.getvalue()


def test_what_is_packed_is_not_unpacked(subtests):
    for path in ["/v1/enqueue", "/api/reward/enqueue", "/api/reward/pull"]:
        with subtests.test(path=path):
            service = Taken(queue_mb=1)
            packed = gzip.compress(latents(1))
            (status, text), (plain, _) = answers(
                service,
                (path, packed, {"Content-Encoding": "gzip"}),
                ("/v1/enqueue", latents(1), {"Content-Encoding": "identity"}),
            )
            assert (status, plain) == (415, 202)
            assert "Content-Encoding: 'gzip'; send the body as it is" in text


def test_16_bit_latents_take_the_room_of_float32():
    service = Taken(queue_mb=1)
    body = latents(4)
    found = answers(service, *[("/v1/enqueue", body, {})] * 3)
    assert [status for status, _ in found] == [202, 202, 429]
    assert service.capacity.held_bytes == 2 * 4 * 131072
    assert service.capacity.num_requests == 2


def test_what_can_never_be_held_is_refused_for_good():
    service = Taken(queue_mb=1)
    service.settings.batch = 9
    ((status, text),) = answers(service, ("/v1/enqueue", latents(9), {}))
    assert (status, "latents of 1179648 bytes as float32, and all may have 1048576 (queue_mb)" in text) == (413, True)
    assert service.capacity.held_bytes == 0


def test_whatever_reading_raises_of_a_body_is_the_senders_fault(monkeypatch):
    for error in (OverflowError("too much"), RecursionError("too deep")):

        def read(data, *, most, error=error):
            raise error

        monkeypatch.setattr(application, "read_body", read)
        assert answers(Taken(1), ("/v1/enqueue", b"", {})) == [(400, json.dumps({"error": str(error)}))]


def test_it_says_which_scorers_requests_may_name():
    service = Taken(1)
    service.kinds = {"a": frozenset({"media", "latents"}), "b": frozenset({"media"})}
    both = "scorer=a&scorer=b"
    asked = ("", f"kind=media&{both}", f"kind=latents&{both}", "kind=media&scorer=c", "scorer=a")
    found = answers(service, *((f"/v1/enqueue?{each}", None, {}) for each in asked))
    plain, known, other_kind, unknown, kindless = found
    assert plain == known == (200, json.dumps({"scorers": {"a": ["latents", "media"], "b": ["media"]}}))
    assert other_kind[0] == 400
    assert (
        "'b' scores media, and the request brings latents; serve it by the reward 'decoded' (cosmos-reward-vision)"
        in other_kind[1]
    )
    assert unknown == (400, '{"error": "scorers: \'c\' is none of this service; it has a, b"}')
    assert kindless == (400, '{"error": "kind: expected latents or media, got \'\'"}')
    service.is_stopping = True
    ((status, _),) = answers(service, ("/v1/enqueue", None, {}))
    assert status == 503


def test_scorers_are_told_to_those_with_the_token():
    ((status, text),) = answers(Taken(1), ("/v1/enqueue", None, {"Authorization": "Bearer other"}))
    assert (status, "the token is missing or another one" in text) == (401, True)


def test_a_form_in_another_encoding_is_refused():
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    nameless = {"Content-Type": "application/x-www-form-urlencoded; charset=none"}
    found = answers(Taken(1), ("/api/reward/pull", b"uuid=\x9a", form), ("/api/reward/pull", b"uuid=x", nameless))
    assert [(status, "not a form: " in text) for status, text in found] == [(400, True)] * 2
