"""Samples and media on the page, over real sockets."""

import base64
import contextlib
import socket
import threading
import time
from concurrent.futures import thread

import pytest

from cosmos_core.config.job import Job
from cosmos_core.config.loading import recipe_from, save_job
from cosmos_core.control.page import samples as routes
from cosmos_core.observe import samples as shown
from cosmos_core.storage.parts import FOLDER
from tests.kept_samples import RECIPE, group, keep, trained

PICTURE = b"\x89PNG and so on"
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


@pytest.fixture
def run(served, tmp_path):
    """The folder of the run that is served, which has samples."""
    save_job(Job(run_id="demo-1", directory=tmp_path, recipe_directory=tmp_path, recipe=recipe_from(RECIPE)))
    (tmp_path / "given.png").write_bytes(PICTURE)
    (tmp_path / "given.txt").write_bytes(PICTURE + b", a secret")
    (tmp_path / "link.png").symlink_to(tmp_path / "given.txt")
    (tmp_path / "renamed.png").write_text("secret")
    places = ("given.png", "given.txt", "page.token", "gone.png", "http://127.0.0.1/a.png", "link.png", "renamed.png")
    media = (URL, "data:text/html;base64,PGI+", *(each if "://" in each else str(tmp_path / each) for each in places))
    rows = [*group(1, 1.0, 0.0, media=media), *group(2, 0.25), *group(3, 0.5, purpose="evaluation")]
    keep(tmp_path, "samples", "rollout-0", rows)
    keep(tmp_path, "steps", "policy-0", [trained(1, 1, 1, 0.5, -0.5)])
    return tmp_path


def test_samples_are_asked_for_and_nonsense_is_a_sentence(served, run):
    found = served.ask("GET", "/api/samples?order=best&purpose=train").json
    assert ([each["lease"] for each in found["groups"]], found["total"]) == ([1, 2], 2)
    assert served.ask("GET", "/api/samples?step=1&text=OF+1").json["total"] == 1
    assert [each["lease"] for each in served.ask("GET", "/api/samples?row=21").json["groups"]] == [1]
    assert served.ask("GET", "/api/samples/1").json["samples"][1]["advantage"] == -0.5
    assert served.ask("GET", "/api/samples/1/tokens/0").json["logprobs"] == [-0.5, -0.5]
    for path, status, words in (
        ("?order=upwards", 422, "not a question for samples: "),
        ("?first=-1", 422, "not a question for samples: "),
        ("?grep=.*", 422, "unknown field `grep`"),
        (f"?text={'x' * 201}", 422, "not a question for samples: "),
        ("?status=good", 422, "status 'good' is none of ok, "),
        ("/99", 404, "are not kept, or not written yet"),
        ("/1/tokens/9", 404, "is not kept, or not written yet"),
        ("/1/tokens/-1", 404, "Not Found"),
    ):
        answer = served.ask("GET", f"/api/samples{path}")
        assert (answer.status, words in answer.json["refused"]) == (status, True), answer.body
    (run / FOLDER / "samples.mine.parquet").write_bytes(b"no part")
    assert served.ask("GET", "/api/samples").json["total"] == 3
    (run / FOLDER / "samples.rollout-1.1.parquet").write_bytes(b"PAR1")
    assert served.ask("GET", "/api/samples").json["note"] == "cannot be read, and left out: samples.rollout-1.1.parquet"


def test_media_of_prompts_are_served_and_no_other_file(served, run, subtests):
    for number in (0, 2):
        answer = served.ask("GET", f"/api/samples/1/given/{number}")
        assert (answer.status, answer.headers["Content-Type"], answer.body) == (200, "image/png", PICTURE)
    for number in (1, 3, 4, 5, 6, 7, 8, 9):
        with subtests.test(number=number):
            answer = served.ask("GET", f"/api/samples/1/given/{number}")
            assert (answer.status, b"secret" in answer.body) == (404, False)


def test_files_are_sent_as_long_as_they_are_read(served, snapshot, run, monkeypatch):
    monkeypatch.setattr("cosmos_core.control.page.service.IDLE_S", 0.3)
    monkeypatch.setattr("cosmos_core.control.page.service._SWEEP_S", 0.1)
    served.page.board.offer(snapshot)  # wakes what sweeps
    data = PICTURE + bytes(24 << 20)  # more than the kernel holds for the two
    (run / "given.png").write_bytes(data)

    def ask(wait_s, part_s):
        """What comes to a browser that waits, and then reads 1 MiB every so many seconds."""
        found = bytearray()
        with socket.create_connection(served.place, timeout=10) as slow, slow.makefile("rb") as file:
            slow.sendall(b"GET /api/samples/1/given/2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            time.sleep(wait_s)
            with contextlib.suppress(ConnectionResetError):
                while part := file.read(1 << 20):
                    found += part
                    time.sleep(part_s)
        return bytes(found)

    assert ask(0.0, 0.05).endswith(data)
    monkeypatch.setattr(routes, "WRITE_S", 0.2)
    assert len(ask(1.0, 0.0)) < len(data), "who does not read is let go"


def test_who_reads_slowly_is_not_waited_for_and_reads_alone(served, run, monkeypatch):
    begun, another, over, threads = threading.Event(), threading.Event(), threading.Event(), []

    def slow(*_, **__):
        (another if begun.is_set() else begun).set()
        threads.append(threading.current_thread())
        over.wait(10)
        return ()

    monkeypatch.setattr(shown, "samples", slow)
    monkeypatch.setattr(routes, "_MOST_WAITING", 2)
    waiting = [threading.Thread(target=served.ask, args=("GET", "/api/samples/1")) for _ in range(2)]
    for each in waiting:
        each.start()
    try:
        assert begun.wait(10)
        assert served.ask("GET", "/api/snapshot").status == 200
        deadline = time.monotonic() + 10
        while (answer := served.ask("GET", "/api/samples?text=x")).status != 503:
            assert time.monotonic() < deadline
        assert answer.json["refused"] == "2 others wait for samples; try again"
        assert not another.wait(0.2), "two read at once"
        # The interpreter waits at its end for those of asyncio's pool.
        assert threads[0] not in thread._threads_queues
    finally:
        over.set()
        for each in waiting:
            each.join()
