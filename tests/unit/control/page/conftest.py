"""A page that is served to sockets of this process, and what there is to see on it."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator

import attrs
import pytest

from cosmos_core.control.live.snapshot import Snapshot
from cosmos_core.control.page.service import Page
from tests import snapshots

SNAPSHOT = snapshots.snapshot()


@attrs.define
class Answer:
    """An HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Served:
    """A page, and a client for it."""

    def __init__(self, page: Page, token: str) -> None:
        self.page = page
        self.token = token
        self.place = page._socket.getsockname()[:2]

    def ask(self, method: str, path: str, body: bytes | None = None, *, token: bool = False, **headers: str) -> Answer:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            given["Authorization"] = f"Bearer {self.token}"
        connection = http.client.HTTPConnection(*self.place, timeout=10)
        try:
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def num_clients(self) -> int:
        """Browsers that watch, as the page's metrics have it."""
        (line,) = re.findall(r"^cosmos_page_clients (\d+)$", self.ask("GET", "/metrics").body.decode(), re.MULTILINE)
        return int(line)

    def post(self, what: object, **options: object) -> Answer:
        return self.ask("POST", "/api/requests", json.dumps(what).encode(), Content_Type="application/json", **options)


@pytest.fixture
def snapshot() -> Snapshot:
    return SNAPSHOT


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    """A page that shows `SNAPSHOT`."""
    page = Page(tmp_path, "127.0.0.1", 0)
    page.board.offer(SNAPSHOT)
    page.start()
    yield Served(page, page.token_file.read_text().strip())
    page.close()
    assert not page._thread.is_alive()


@pytest.fixture
def answering() -> Iterator[Callable[[Page, str], list[bytes]]]:
    """Play the controller: answer whatever is asked with a refusal, which may be empty; what was asked."""
    over, threads = threading.Event(), []

    def start(page: Page, refusal: str) -> list[bytes]:
        asked: list[bytes] = []

        def serve() -> None:
            while not over.wait(0.01):
                for each in page.board.take_asked():
                    asked.append(each.request)
                    page.board.answer(each.ident, refusal)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return asked

    yield start
    over.set()
    for thread in threads:
        thread.join()
