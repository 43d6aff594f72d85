from __future__ import annotations

import pytest
import zmq


class KeepingContext:
    """A context that closes the sockets of a test, which pyzmq would warn about if they were collected open."""

    def __init__(self, context: zmq.Context) -> None:
        self._context = context
        self._kept: list[zmq.Socket] = []

    def socket(self, kind: int) -> zmq.Socket:
        self._kept.append(self._context.socket(kind))
        return self._kept[-1]

    def close(self) -> None:
        for socket in self._kept:
            socket.close(linger=0)


@pytest.fixture
def context():
    with zmq.Context() as context:
        keeping = KeepingContext(context)
        yield keeping
        keeping.close()
