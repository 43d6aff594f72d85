"""Worker processes: framed messages over an inherited socket, the replica's end of it, and the worker's life."""

from __future__ import annotations

import abc
import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.errors import CosmosError, PluginError, TransportError
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.transport.bounds import DETAIL, sendable
from cosmos_core.transport.codec import Codec


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


_CHUNK: Final = 1 << 16
_START_S: Final = 120.0
_LONGEST_TRACE: Final = 8000
_CORE: Final = str(Path(__file__).parents[2])
_LIBRARIES: Final = tuple(sysconfig.get_paths().values())
GRACE_S: Final = 1.0
"""How much later than the worker's own time limit of a coroutine the replica takes action."""


class WorkerProcess(abc.ABC):
    """The pool's end of a process, `python -m module`, given one end of a socket, files to share, and a first message.

    All methods are called on the pool's thread.

    Attributes:
        socket: The pool's end of the socket.
        is_ready: Whether it has loaded its plugins.
        heard: When it last said something, or was started (monotonic seconds).
    """

    def __init__(self, module: str, first: bytes, replies: Codec, *shared: int) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            files = (theirs.fileno(), *shared)
            command = [sys.executable, "-P", "-m", module, *map(str, files)]
            self._process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        self.socket.setblocking(False)
        self.is_ready = False
        self.heard = time.monotonic()
        self._replies = replies
        self._unframer = Unframer()
        self._unsent = bytearray(frame(first))

    @abc.abstractmethod
    def due(self) -> float:
        """When it is late, once it is ready (monotonic seconds); infinity while it owes nothing."""

    def deadline(self) -> float:
        """When it is late (monotonic seconds); infinity while it owes nothing."""
        return self.due() if self.is_ready else self.heard + _START_S

    @property
    def wants_write(self) -> bool:
        """True if something waits to be sent."""
        return bool(self._unsent)

    def put(self, framed: bytes) -> None:
        """Have a frame sent, at the end of the pool's turn."""
        self._unsent += framed

    def send(self) -> None:
        """Send what the socket takes now."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            return
        except ConnectionError:
            sent = len(self._unsent)  # the end of the stream says what happened
        del self._unsent[:sent]

    def messages(self) -> Iterator[Any]:
        """Yield each message that came, once it is ready.

        Raises:
            EOFError: It has ended.
            PluginError: It could not load its plugins.
            TransportError: What it sent cannot be read.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        for message in map(self._replies.decode, self._unframer.feed(data)):
            self.heard = time.monotonic()
            if isinstance(message, Broken):
                raise PluginError(message.reason)
            if isinstance(message, Ready):
                self.is_ready = True
            else:
                yield message

    def end(self, grace_s: float = 0.0) -> str:
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


class Worker(abc.ABC):
    """The server that a worker process runs, for one replica, over a connected socket."""

    def __init__(self, connection: socket.socket, questions: Codec, replies: Codec) -> None:
        self._connection = connection
        self._questions = questions
        self._replies = replies

    @abc.abstractmethod
    async def serve(self) -> None:
        """Serve until the other side closes.

        Raises:
            CosmosError: What it serves cannot be loaded.
        """

    async def arrivals(self) -> AsyncIterator[list[Any]]:
        """Yield the messages that came together, until the other side closes."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        unframer = Unframer()
        while data := await reader.read(_CHUNK):
            yield [*map(self._questions.decode, unframer.feed(data))]

    async def messages(self) -> AsyncIterator[Any]:
        """Yield each message, until the other side closes."""
        async for together in self.arrivals():
            for message in together:
                yield message

    def send(self, *messages: object) -> None:
        """Say something, at once and in the order of calls."""
        self._writer.write(b"".join(frame(self._replies.encode(message)) for message in messages))

    def send_broken(self, reason: str) -> None:
        """Say why this worker ends."""
        self._connection.setblocking(True)
        self._connection.sendall(frame(self._replies.encode(Broken(reason=reason))))


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
    """An error of a plugin, as people are told of it: in one line."""
    return shown(f"{type(error).__name__}: {' '.join(str(error).split())}")


def place_of(error: BaseException) -> str:
    """File and line at which a plugin raised an error, or called the library that did; empty of a `CosmosError`."""
    if isinstance(error, CosmosError):
        return ""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_CORE)]
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES)] or frames[:1]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def traced(error: BaseException) -> tuple[str, str, str]:
    """Tell an error of a plugin in words, with its place if there is one, then give that place and the traceback."""
    place, trace = sendable(place_of(error)), sendable("".join(traceback.format_exception(error))[-_LONGEST_TRACE:])
    told = described(error)
    return shown(f"{told.removesuffix(': ')} ({place})") if place else told, place, trace


def shown(text: str) -> str:
    """The beginning of a text, fit for a message."""
    return sendable(text[:DETAIL])
