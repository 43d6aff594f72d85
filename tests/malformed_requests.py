"""HTTP requests that no browser sends, made from good ones by a seeded hand."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_BODY = b'{"do": "drain", "name": "rollout-0"}'
GOOD = (
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


def spoilt(chance: random.Random, good: Sequence[bytes] = GOOD) -> bytes:
    """A request of which something is wrong, made from a good one."""
    data = bytearray(chance.choice(good))
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
                data += chance.choice(good)
            case _:
                line = data.find(b"\r\n") + 2
                data[line:line] = chance.choice(_PIECES)
        if not data:
            data = bytearray(chance.randbytes(chance.randint(1, 64)))
    return bytes(data)


def is_beyond_aiohttp(data: bytes) -> bool:
    """Whether aiohttp answers a request with status 500 by itself: an `Expect` that is no ASCII."""
    return re.search(rb"(?i)expect:[^\r\n]*[\x80-\xff]", data) is not None
