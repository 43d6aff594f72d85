"""The page over real sockets."""

import contextlib
import http.client
import json
import select
import socket
import threading
import time

import attrs
import pytest

from cosmos_core.control.page import application
from cosmos_core.control.page.service import Page
from cosmos_core.errors import TransportError
from cosmos_core.transport.messages import REQUEST, Drain, Set

FRAMES = b"RIFF\0\0\0\0WEBP and so on"


class Stream:
    """A client of the server-sent events."""

    def __init__(self, served):
        self._connection = http.client.HTTPConnection(*served.place, timeout=10)
        self._connection.request("GET", "/api/events")
        self._file = self._connection.getresponse()
        self.status = self._file.status

    def next(self):
        """Name and data of the next event."""
        name = ""
        while line := self._file.readline():
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                return name, json.loads(line[6:])
        raise AssertionError("the stream has ended")

    def until(self, name):
        """The next event of a name: its data."""
        while True:
            found, data = self.next()
            if found == name:
                return data

    def close(self):
        self._file.close()
        self._connection.close()


@pytest.fixture
def stream(served):
    opened = []

    def begin():
        opened.append(Stream(served))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def test_only_the_files_of_the_page_are_served_and_every_answer_is_hardened(served, subtests):
    for path, media_type in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        answer = served.ask("GET", path)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == f"{media_type}; charset=utf-8"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
    page = served.ask("GET", "/").body.decode()
    assert "http" not in page.replace("https://", "http://").split("<body>")[0]  # nothing from elsewhere
    assert "onclick" not in page
    assert "style=" not in page

    for answer in (served.ask("GET", "/nope"), served.ask("POST", "/"), served.ask("GET", "/metrics", Host="evil")):
        assert answer.status in (401, 403, 404)
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"

    # Held-out samples and frames of them are served from the run's folder, and nothing beside them.
    folder = served.page.token_file.parent / "media" / "step-12"
    folder.mkdir(parents=True)
    for name, media_type in (("row-3.strip.webp", "image/webp"), ("row-3.mp4", "video/mp4"), ("row-3.json", "")):
        (folder / name).write_bytes(FRAMES)
        answer = served.ask("GET", f"/media/step-12/{name}")
        if media_type:
            assert (answer.status, answer.headers["Content-Type"], answer.body) == (200, media_type, FRAMES)
        else:
            assert answer.status == 404
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    missing = ["/media/step-12/row-4.strip.webp", "/media/step-12/row-4.mp4", "/media/step-12/../../page.token"]
    for path in [*missing, "/../pyproject.toml", "/assets/page.js", "/page.token", "/%2e%2e/page.token", "//etc"]:
        with subtests.test(path=path):
            assert served.ask("GET", path).status == 404


def test_the_run_as_it_is_now(served, snapshot):
    found = served.ask("GET", "/api/snapshot").json
    assert found["run"]["step"] == 3
    assert found["run"]["replicas"][1]["status"] == "generating"
    assert found["curves"][0] == {"name": "reward", "points": [[1.0, 0.25], [2.0, 0.5]]}
    served.page.board.offer(attrs.evolve(snapshot, step=4, loss=float("nan")))
    deadline = time.monotonic() + 5
    while (found := served.ask("GET", "/api/snapshot").json)["run"]["step"] != 4:
        assert time.monotonic() < deadline
    assert found["run"]["loss"] is None


def test_a_stream_brings_what_has_changed_and_nothing_else(served, stream, snapshot):
    watching = stream()
    assert watching.status == 200
    first = dict(watching.next() for _ in range(5))
    assert sorted(first) == ["curves", "heldout", "news", "run", "samples"]
    assert first["run"]["step"] == 3
    served.page.board.offer(attrs.evolve(snapshot, step=4))
    name, data = watching.next()
    assert (name, data["step"]) == ("run", 4)  # neither curves nor samples, which are as they were
    served.page.board.offer(attrs.evolve(snapshot, step=4, curves=snapshot.curves[:1]))
    assert watching.next()[0] == "curves"


def test_those_who_watch_see_the_end(served, stream, snapshot):
    watching = stream()
    watching.until("run")
    served.page.board.offer(attrs.evolve(snapshot, outcome="finished"))
    threading.Thread(target=served.page.close).start()
    assert watching.until("run")["outcome"] == "finished"
    assert watching.until("end") is True


def test_a_request_goes_to_the_controller_and_its_answer_back(served, answering):
    asked = answering(served.page, "")
    answer = served.post({"do": "set", "overrides": ["policy.optimizer.lr=1e-6"]}, token=True)
    assert (answer.status, answer.json) == (200, {"done": True})
    assert [REQUEST.decode(each) for each in asked] == [Set(overrides=("policy.optimizer.lr=1e-6",))]


def test_why_the_controller_refuses_is_told(served, answering):
    asked = answering(served.page, "nobody has that name")
    answer = served.post({"do": "drain", "name": "x"}, token=True)
    assert (answer.status, answer.json) == (409, {"refused": "nobody has that name"})
    assert [REQUEST.decode(each) for each in asked] == [Drain(name="x")]


def test_what_may_not_ask_does_not_reach_the_controller(served, subtests):
    for options, status in [
        ({}, 401),
        ({"token": True, "Origin": "http://evil.example"}, 403),
        ({"token": True, "Sec_Fetch_Site": "cross-site"}, 403),
        ({"token": True, "Host": "evil.example"}, 403),
        ({"token": True, "Content_Encoding": "gzip"}, 415),
    ]:
        with subtests.test(options=options):
            assert served.post({"do": "drain", "name": "x"}, **options).status == status
            assert served.page.board.take_asked() == []

    answer = served.ask("POST", "/api/requests", b'{"do": "stop"}', token=True, Content_Type="text/plain")
    assert answer.status == 415
    assert served.ask("GET", "/api/requests", token=True).status == 405
    assert served.page.board.take_asked() == []

    answer = served.post({"do": "explode"}, token=True)
    assert answer.status == 422
    assert "explode" in answer.json["refused"]

    body = json.dumps({"do": "drain", "name": "x" * 20_000}).encode()
    assert served.ask("POST", "/api/requests", body, token=True, Content_Type="application/json").status == 413


def test_a_controller_that_does_not_answer_is_told_and_only_so_much_is_asked_at_once(served, monkeypatch):
    monkeypatch.setattr("cosmos_core.control.page.board._ANSWER_S", 0.05)
    answer = served.post({"do": "stop"}, token=True)
    assert answer.status == 503
    assert "has not answered" in answer.json["refused"]

    monkeypatch.setattr("cosmos_core.control.page.board._MOST_ASKED", 0)
    assert served.post({"do": "stop"}, token=True).status == 503


def test_only_so_many_watch_at_once(served, stream, monkeypatch):
    monkeypatch.setattr(application, "MOST_STREAMS", 2)
    first = [stream(), stream()]
    assert [each.until("run")["step"] for each in first] == [3, 3]
    assert stream().status == 503
    first[0].close()
    deadline = time.monotonic() + 10
    while (status := stream().status) != 200:
        served.page.board.offer(attrs.evolve(served.page.board.snapshot, time=time.time()))  # it notices when it writes
        assert time.monotonic() < deadline, status


def test_a_browser_that_does_not_read_holds_nobody_up(served, monkeypatch, snapshot):
    monkeypatch.setattr(application, "WRITE_S", 1.0)
    deadline = time.monotonic() + 60
    text = "x" * 20_000
    step, took = 0, 0.0
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(served.place)
        slow.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while served.num_clients() != 1:
            assert time.monotonic() < deadline
        # Which of them are written depends on how busy the machine is; what is enough is seen by its effect.
        while served.num_clients() != 0:
            assert time.monotonic() < deadline, "it is still served"
            for _ in range(10):
                step += 1
                samples = tuple(attrs.evolve(snapshot.samples[0], text=f"{step} {text}") for _ in range(12))
                newer = attrs.evolve(snapshot, step=step, samples=samples)
                began = time.perf_counter()
                served.page.board.offer(newer)
                took = max(took, time.perf_counter() - began)
                time.sleep(0.003)
    assert took < 1.0


def test_connections_that_say_nothing_whole_are_closed(served, monkeypatch):
    monkeypatch.setattr("cosmos_core.control.page.service.IDLE_S", 0.3)
    monkeypatch.setattr("cosmos_core.control.page.service._SWEEP_S", 0.1)
    silent, slow = (socket.create_connection(served.place, timeout=10) for _ in range(2))
    slow.sendall(b"GET / HTTP/1.1\r\nHost: local")
    for each in (silent, slow):
        began = time.monotonic()
        while each.recv(1000):  # an answer may come first, that it took too long
            assert time.monotonic() - began < 8
        each.close()
    with socket.create_connection(served.place, timeout=10) as deaf:
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000)
        hung_up = select.poll()
        hung_up.register(deaf, select.POLLRDHUP)
        assert hung_up.poll(10_000)


def test_there_are_only_so_many_connections(served, monkeypatch):
    monkeypatch.setattr(application, "MOST_CONNECTIONS", 3)
    held = [socket.create_connection(served.place, timeout=5) for _ in range(3)]
    for each in held:
        each.sendall(b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert each.recv(12) == b"HTTP/1.1 200"
    turned_away = socket.create_connection(served.place, timeout=5)
    try:
        assert turned_away.recv(1) == b""
    finally:
        for each in (*held, turned_away):
            each.close()


def test_ports_and_addresses_that_cannot_be_had_are_told(served, tmp_path):
    with pytest.raises(TransportError, match=r"the page cannot listen on 127\.0\.0\.1:\d+ \(control\.page_port\)"):
        Page(tmp_path, "127.0.0.1", served.place[1])

    other = Page(tmp_path, "127.0.0.1", 0, preferred=served.place[1])
    port = other._socket.getsockname()[1]
    other.close()
    assert port != served.place[1]
    again = Page(tmp_path, "127.0.0.1", 0, preferred=port)
    assert again._socket.getsockname()[1] == port
    again.close()

    with pytest.raises(TransportError, match=r"control\.page_bind"):
        Page(tmp_path, "no-such-machine.invalid", 0)


def test_an_exposed_page_tells_nothing_without_the_token(tmp_path, snapshot):
    page = Page(tmp_path, "0.0.0.0", 0)
    page.board.offer(snapshot)
    page.start()
    try:
        kept = ("samples", "samples/1", "samples/1/tokens/0", "samples/1/given/0")
        told = (
            "api/snapshot",
            "api/events",
            *(f"api/{each}" for each in kept),
            "media/step-1/row-1.png",
            "metrics",
            "x",
        )
        for path, status in (("/", 200), *((f"/{each}", 401) for each in told)):
            connection = http.client.HTTPConnection("127.0.0.1", page._socket.getsockname()[1], timeout=5)
            connection.request("GET", path)
            assert connection.getresponse().status == status
            connection.close()
    finally:
        page.close()
