"""A page that is served to sockets of this process, and what there is to see on it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator

import attrs
import pytest

from cosmos_core.controller.live.chronicle import News, SampleView
from cosmos_core.controller.live.curves import Curve
from cosmos_core.controller.live.snapshot import Queue, ReplicaView, Snapshot
from cosmos_core.controller.page.service import Page

SNAPSHOT = Snapshot(
    time=1000.0,
    name="arithmetic",
    run_id="run-1",
    term=1,
    phase="training",
    outcome="",
    reason="",
    stage="grpo",
    step=3,
    num_steps=9,
    version=3,
    versions={2: 1, 3: 1},
    generation=1,
    members=("policy-0",),
    standings={"policy": {"training": 1}, "rollout": {"generating": 1, "loading": 1}},
    replicas=(
        ReplicaView(name="policy-0", role="policy", standing="training", step=3, place="pid 1 on host"),
        ReplicaView(name="rollout-0", role="rollout", standing="generating", step=3, in_flight=5, units_per_s=120.5),
        ReplicaView(name="rollout-1", role="rollout", standing="loading", step=2, units_per_s=80.0),
        ReplicaView(name="rollout-2", role="", standing="lost", detail="silent for 15 s"),
    ),
    queue=Queue(queued=1, in_flight=5, finished=2, claimed=4, consumed=12, dropped={"stale": 3}),
    staleness={0: 10, 1: 6},
    reward=0.5,
    loss=0.25,
    mismatch=1e-3,
    accuracy=None,
    policy_units_per_s=1000.0,
    rollout_units_per_s=200.5,
    settings={},
    refused=0,
    news=(News(time=999.0, kind="joined", text="rollout-0"),),
    samples=(
        SampleView(time=999.0, replica="rollout-0", version=3, status="ok", reward=1.0, units=9, text="3 + 4 = 7"),
    ),
    curves=(Curve(name="reward", points=((1.0, 0.25), (2.0, 0.5))), Curve(name="loss", points=((1.0, 1.0),))),
)


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
