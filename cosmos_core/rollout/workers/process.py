"""Worker processes: framed messages over an inherited socket, the replica's end of it, and the worker's life."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import attrs

from cosmos_core.errors import CosmosError, TransportError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.transport.bounds import DETAIL, sendable


@attrs.frozen(kw_only=True)
class Ready:
    """The worker loaded its plugins."""


@attrs.frozen(kw_only=True)
class Broken:
    """The worker could not load its plugins, and ends."""

    reason: str


_PREFIX: Final = struct.Struct("<I")
_LARGEST: Final = 1 << 30


def frame(data: bytes) -> bytes:
    """A message with its length before it."""
    if len(data) > _LARGEST:
        raise TransportError(f"a message of {len(data)} bytes to or from a worker is above {_LARGEST}")
    return _PREFIX.pack(len(data)) + data


class Unframer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what arrived and yield each message that is complete."""
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            (size,) = _PREFIX.unpack_from(self._buffer)
            if size > _LARGEST:
                raise TransportError(f"a frame of {size} bytes from a worker is above {_LARGEST}")
            end = _PREFIX.size + size
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_PREFIX.size : end])
            del self._buffer[:end]
            yield message


_CHUNK = 1 << 16


class WorkerProcess:
    """A process, `python -m module`, that is given one end of a socket by its descriptor, and a first message."""

    def __init__(self, module: str, first: bytes) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.socket.setblocking(False)
        self._unframer = Unframer()
        self._unsent = bytearray(frame(first))

    @property
    def wants_write(self) -> bool:
        """True if something waits to be sent."""
        return bool(self._unsent)

    def put(self, framed: bytes) -> None:
        """Send a frame, or what the socket takes of it now."""
        self._unsent += framed
        self.send()

    def send(self) -> None:
        """Send what the socket takes now."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            return
        except ConnectionError:
            sent = len(self._unsent)  # the end of the stream says what happened
        del self._unsent[:sent]

    def receive(self) -> Iterator[bytes]:
        """Yield each message that came."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        yield from self._unframer.feed(data)

    def end(self, grace_s: float) -> str:
        """End it, by force unless it has ended or does so within `grace_s`; how it ended, in words."""
        try:
            code = self._process.wait(grace_s)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            how = "killed"
        self.socket.close()
        return how


class Worker(Protocol):
    """The server that a worker process runs."""

    async def serve(self) -> None:
        """Serve until the other side closes.

        Raises:
            CosmosError: What it serves cannot be loaded.
        """
        ...

    def send_broken(self, reason: str) -> None:
        """Say why this worker ends."""
        ...


def live(make: Callable[[socket.socket], Worker]) -> None:
    """Serve over the socket whose descriptor is the first argument of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.setblocking(False)
        worker = make(connection)
        try:
            asyncio.run(worker.serve())
        except CosmosError as error:
            worker.send_broken(str(error))
        except ConnectionError:
            return  # the replica is gone


def described(error: BaseException) -> str:
    """An error of a plugin, as people are told of it."""
    return shown(f"{type(error).__name__}: {error}")


def shown(text: str) -> str:
    """The beginning of a text, fit for a message."""
    return sendable(text[:DETAIL])
