"""The health channel of a replica's processes: one that fails ends the others, promptly and with its error.

Each follower keeps a connection to the leader (`health_leader`). One that cannot go on says why before it ends; one
that is killed closes its connection. Either way the leader finds out which failure came first, tells the controller and
the other followers, and the process ends, whatever its main thread is stuck in. Whoever does not appear, answer or
finish in time is named in a `ReplicaError`; what comes and is no message is a `TransportError`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self, TypeAlias

import attrs

from cosmos_core.devices import HOW_IT_FAILED, has_failed
from cosmos_core.errors import CosmosError, ProcessLostError, ReplicaError, TransportError
from cosmos_core.replica.lifetime import LOST, call_later
from cosmos_core.transport.codec import Codec


@attrs.frozen(kw_only=True)
class Join:
    """A follower is there; `token` shows that it belongs to this start of the run."""

    rank: int
    token: str
    pid: int


@attrs.frozen(kw_only=True)
class Failure:
    """A process cannot go on.

    Attributes:
        time: `time.time()` when it happened: processes may be on several machines.
        is_echo: Whether it may be no more than what another's failure looks like from here.
        is_loss: Whether the process ended without a word, as one does that is killed, or its GPU has failed.
    """

    rank: int
    reason: str
    time: float
    is_echo: bool
    is_loss: bool = False


@attrs.frozen(kw_only=True)
class Abandon:
    """Waiting for the gradient group of this generation, or an older one, has become pointless."""

    generation: int


@attrs.frozen(kw_only=True)
class End:
    """The replica ends because of this error; `is_loss` as in `Failure`."""

    reason: str
    is_loss: bool = False


@attrs.frozen(kw_only=True)
class Goodbye:
    """This process has done its work; up, it waits for the leader's goodbye, and down, it is free to go."""


@attrs.frozen(kw_only=True)
class Ping:
    """This process is there: the leader says it now and then, and each follower answers with the same."""


Message: TypeAlias = Join | Failure | Abandon | End | Goodbye | Ping

_CODEC: Final = Codec((Join, Failure, Abandon, End, Goodbye, Ping))
_LENGTH: Final = struct.Struct(">I")
_MAX_BYTES: Final = 16 << 20
_MAX_JOIN_BYTES: Final = 4 << 10
"""Of one who has not joined, and may be anybody."""
_SEND_TIMEOUT_S: Final = 2.0
_SILENCE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A machine that no longer answers is gone after half a minute."""


class Connection:
    """A connection; one thread receives, any may send. The rank is negative before the other process has joined."""

    def __init__(self, connection: socket.socket, rank: int = -1) -> None:
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket: Final = connection
        self.rank = rank
        self.pid = 0
        self.has_left = False
        self.began_at: Final = time.monotonic()
        self.heard_at = self.began_at
        self._sending: Final = threading.Lock()
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Send; one who is gone is noticed by whoever receives."""
        data = _CODEC.encode(message)
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Message] | None:
        """The messages that have come; None once the other end is gone. Call it when there is something to read."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard_at = time.monotonic()
        self._received += data
        return list(self._whole())

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _whole(self) -> Iterator[Message]:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            most = _MAX_BYTES if self.rank >= 0 else _MAX_JOIN_BYTES
            if length > most:
                raise TransportError(f"a message of {length:,} bytes; {most:,} are the most")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            yield _CODEC.decode(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]


LEADER: Final = 0
PATIENCE_S: Final = 15.0
"""Silence after which another process is frozen, or its machine gone."""
GOODBYE_S: Final = 120.0
"""How long processes may differ in the end of their work."""
ANSWER_S: Final = 1.0
"""How long the other end may take to answer."""
PAUSE_S: Final = 4.0
"""Between two looks, this process did not run: it has no right to call others silent."""
_FAREWELL_S: Final = 1.5

Ender = Callable[[ReplicaError], None]
"""Ends this process because of another one's error; called on a channel's thread, and does not return."""


class HealthChannel:
    """The health channel of a replica of one process, which has no other process to lose."""

    def __init__(self, rank: int = LEADER) -> None:
        self.rank: Final = rank
        self.abandoned = -1
        """Newest generation that the leader no longer waits for."""
        self._cause: End | None = None

    def abandon(self, generation: int) -> None:
        """Let the followers stop waiting for the gradient group of a generation."""

    def goodbye(self) -> None:
        """Return once every process has done its work."""

    def fail(self, failure: Failure) -> End:
        """Tell the others; what ends the replica: this failure, or the one that it is the echo of."""
        return End(reason=failure.reason)

    def _end_soon(self) -> None:
        """End the process even if what is left of it waits for others."""
        call_later(_FAREWELL_S, self._leave)

    def _leave(self) -> None:
        os._exit(LOST if self._cause is not None and self._cause.is_loss else 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.goodbye()
        elif isinstance(error, Exception):
            own = _failure_of(error, self.rank)
            cause = self.fail(own)
            if cause.reason != own.reason:
                raise error_of(cause) from error


def error_of(cause: End) -> ReplicaError:
    """The cause of a process's end, as an error."""
    return ProcessLostError(cause.reason) if cause.is_loss else ReplicaError(cause.reason)


def words_of(error: BaseException) -> str:
    """An error in words; of a RuntimeError from another error, which torch's pipelines raise, those of the other.

    Of what CUDA says of a GPU that has failed, all lines but the first are advice on how to debug programs.
    """
    is_gpu = has_failed(error)
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    words = str(error) if isinstance(error, CosmosError) else f"{type(error).__name__}: {error}"
    return f"{words.splitlines()[0]}; {HOW_IT_FAILED}" if is_gpu else words


def _failure_of(error: Exception, rank: int) -> Failure:
    """An error of `torch.distributed`, which is a RuntimeError, may be no more than another process's end."""
    chain, is_gpu = [error, *filter(None, [error.__cause__])], has_failed(error)
    return Failure(
        rank=rank,
        reason=words_of(error),
        time=time.time(),
        is_echo=not is_gpu and any(isinstance(each, RuntimeError) for each in chain),
        is_loss=is_gpu or isinstance(error, ProcessLostError),
    )


class FollowerChannel(HealthChannel):
    """A follower's end; `token` shows that it belongs to this start of the run."""

    def __init__(
        self, *, name: str, rank: int, token: str, address: tuple[str, int], end: Ender, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(rank)
        self._patience_s: Final = patience_s
        self._name: Final = name
        self._end: Final = end
        try:
            self._connection: Final = Connection(socket.create_connection(address, ANSWER_S), LEADER)
        except OSError as error:
            raise ReplicaError(f"{name}: its leader at {address[0]}:{address[1]} cannot be reached: {error}") from error
        self._news: Final = threading.Condition()
        self._is_main_waiting = False
        self._connection.send(Join(rank=rank, token=token, pid=os.getpid()))
        self._thread: Final = threading.Thread(target=self._run, name="health-channel", daemon=True)
        self._thread.start()

    def goodbye(self) -> None:
        """Tell the leader that the work is done, and wait until all have."""
        self._connection.send(Goodbye())
        self._thread.join(GOODBYE_S)
        if self._thread.is_alive():
            raise ReplicaError(f"{self._name}: the leader did not say goodbye within {GOODBYE_S:g} s")
        self._connection.close()

    def fail(self, failure: Failure) -> End:
        """Tell the leader; what ends the replica."""
        self._end_soon()
        with self._news:
            self._is_main_waiting = True
        self._connection.send(failure)
        with self._news:
            self._news.wait_for(lambda: self._cause, ANSWER_S)
            cause = self._cause
        own = f"{self._name} rank {failure.rank}: {failure.reason}"
        return End(reason=failure.reason) if cause is None or cause.reason == own else cause

    def _run(self) -> None:
        looked_at = time.monotonic()
        while True:
            messages = self._receive()
            now = time.monotonic()
            if now - looked_at > PAUSE_S:
                self._connection.heard_at += now - looked_at
            # By when it looked before: what lies unread since this process did not run is no silence.
            is_silent = looked_at - self._connection.heard_at > self._patience_s
            looked_at = now
            if messages is None or is_silent:
                silent = f"has been silent for {self._patience_s:g} s (control.lost_after_s)"
                what = "is gone" if messages is None else silent
                self._finish(End(reason=f"{self._name} rank {LEADER}: its process, the leader, {what}", is_loss=True))
                return
            for message in messages:
                match message:
                    case Abandon():
                        self.abandoned = max(self.abandoned, message.generation)
                    case End():
                        self._finish(message)
                        return
                    case Goodbye():
                        return
                    case Ping():
                        self._connection.send(Ping())
                    case _:
                        pass

    def _receive(self) -> list[Message] | None:
        try:
            return self._connection.receive()
        except TransportError:
            return None

    def _finish(self, cause: End) -> None:
        self._connection.close()
        with self._news:
            self._cause = cause
            self._news.notify_all()
            is_main_waiting = self._is_main_waiting
        if not is_main_waiting:
            self._end(error_of(cause))
