"""Malformed requests, made from good ones by a seeded hand: nothing crashes, leaks, or reaches the controller."""

import os
import random
import socket
import threading

import psutil
import pytest

_BODY = b'{"do": "drain", "name": "rollout-0"}'
_GOOD = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /api/snapshot HTTP/1.1\r\nHost: 127.0.0.1:80\r\nAccept: */*\r\nSec-Fetch-Site: same-origin\r\n\r\n",
    b"HEAD /page.js HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer abc\r\nX-Long: " + b"y" * 300 + b"\r\n\r\n",
    b"POST /api/requests HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_BODY), _BODY),
    b"POST /api/requests HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n24\r\n%s\r\n0\r\n\r\n"
    % _BODY,
    b"GET /api/events HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)
_PIECES = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"%00", b"%2e%2e/", b"../", b"\xff\xfe", b"\x80", b"HTTP/9.9",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Host: localhost\r\n",
    b"Host: evil\r\n", b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"Origin: null\r\n",
    b"Connection: close\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"fffffffffffffff\r\n",
    b"GET http://evil/ HTTP/1.1\r\n", b"A" * 9000, b"B: c\r\n" * 200, b"CONNECT evil:443 HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n", "İ²🙈".encode(),
)  # fmt: skip


def spoilt(chance: random.Random) -> bytes:
    """A request of which something is wrong."""
    data = bytearray(chance.choice(_GOOD))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                data[at:at] = chance.choice(_PIECES)
            case 1:
                del data[at : at + chance.randint(1, 12)]
            case 2:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 3:
                del data[at:]
            case 4:
                data += chance.choice(_GOOD)
            case _:
                line = data.find(b"\r\n") + 2
                data[line:line] = chance.choice(_PIECES)
        if not data:
            data = bytearray(chance.randbytes(chance.randint(1, 64)))
    return bytes(data)


def send(place: tuple[str, int], data: bytes) -> bytes:
    """The beginning of what comes back before the connection ends; a stream does not end by itself."""
    with socket.create_connection(place, timeout=20) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while (more := connection.recv(65536)) and b"text/event-stream" not in found:
                found = (found + more)[:4096]
        except (ConnectionError, BrokenPipeError):
            return b""
        return found


def molest(served, number: int, seed: int) -> None:
    """Send so many, and see that all is as it was."""
    chance = random.Random(seed)
    before = served.ask("GET", "/api/snapshot").body
    process = psutil.Process()
    grown_from, fds, threads = 0, process.num_fds(), threading.active_count()
    for index in range(number):
        if index == number // 5:
            grown_from = process.memory_info().rss
        data = spoilt(chance)
        answer = send(served.place, data)
        where = f"request {index} of seed {seed}: {data!r}: {answer!r}"
        assert b" 500 " not in answer[:64], where
        assert b'"done"' not in answer, where
        if index % 50 == 0:
            assert served.page.board.take_asked() == [], where
    assert served.page.board.take_asked() == []
    assert served.page._thread.is_alive()
    assert served.ask("GET", "/api/snapshot").body == before
    assert process.memory_info().rss - grown_from < 40_000_000
    assert process.num_fds() < fds + 60
    assert threading.active_count() < threads + 5


def test_malformed_requests_change_nothing(served, caplog):
    molest(served, 1500, seed=int(os.environ.get("COSMOS_SEED", "7")))
    assert caplog.records == []


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_half_a_million_malformed_requests_change_nothing(served):
    for seed in range(100):
        molest(served, 5000, seed=1000 + seed)
