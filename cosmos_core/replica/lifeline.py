"""What holds the processes of a replica together: one that fails ends the others, promptly and with its error.

Each follower keeps a connection to the leader. One that cannot go on says why before it ends; one that is killed
closes its connection. Either way the leader finds out which failure came first, tells the controller and the other
followers, and the process ends, whatever its main thread is stuck in.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from cosmos_core.errors import CosmosError, ProcessLostError, ReplicaError, TransportError
from cosmos_core.replica.wire import Abandon, End, Failure, Goodbye, Join, Message, Ping, Wire

_LOG: Final = logging.getLogger(__name__)

LEADER: Final = 0
LOST: Final = os.EX_TEMPFAIL
"""Exit code of a process that ends though nothing is wrong with the run: another one can take its place."""

_SETTLE_S: Final = 0.2
"""How long news of other failures is awaited after the first: an echo may arrive before what it is the echo of."""
_ANSWER_S: Final = 1.0
_GOODBYE_S: Final = 120.0
_FAREWELL_S: Final = 1.5
_POLL_S: Final = 0.1
_PING_S: Final = 1.0
_PAUSE_S: Final = 4.0
"""Between two looks, this process did not run: it has no right to call others silent."""
PATIENCE_S: Final = 15.0

Ender = Callable[[ReplicaError], None]
"""Ends this process because of an error; does not return."""


class Lifeline:
    """That of a replica of one process: there is nobody to lose.

    Attributes:
        abandoned: Newest generation that the leader no longer waits for.
    """

    def __init__(self) -> None:
        self.abandoned = -1
        self._cause: End | None = None

    def abandon(self, generation: int) -> None:
        """Let the followers stop waiting for the gradient group of a generation."""

    def goodbye(self) -> None:
        """Return once every process has done its work."""

    def fail(self, failure: Failure) -> End:
        """Tell the others; what ends the replica: this failure, or the one that it is the echo of."""
        return End(reason=failure.reason)

    @property
    def rank(self) -> int:
        """This process's place in the replica."""
        return LEADER

    def _end_soon(self) -> None:
        """End the process even if what is left of it waits for others."""
        timer = threading.Timer(_FAREWELL_S, self._leave)
        timer.daemon = True
        timer.start()

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
                raise _error_of(cause) from error


class LeaderLine(Lifeline):
    """The leader's end: it listens from the start, `meet` waits for the followers.

    Args:
        name: The replica's name.
        size: Its processes.
        token: What followers of this start of the run know.
        host: Address to listen on.
        end: Called on a thread of this object when a follower failed.
        patience_s: Silence after which a follower is frozen, or its machine gone.

    Raises:
        TransportError: The address cannot be listened on.
    """

    def __init__(
        self, *, name: str, size: int, token: str, host: str, end: Ender, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__()
        self._patience_s: Final = patience_s
        self._name: Final = name
        self._size: Final = size
        self._token: Final = token
        self._end: Final = end
        self._server: Final = _listen(host)
        self._news: Final = threading.Condition()
        self._joined: Final[dict[int, Wire]] = {}
        self._failures: Final[list[Failure]] = []
        self._is_main_waiting = False
        self._is_ending = False
        self._is_over = False
        self._selector: Final = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread: Final = threading.Thread(target=self._run, name="lifeline", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def meet(self, timeout_s: float, interrupted: Callable[[], bool]) -> None:
        """Wait until every follower has joined.

        Raises:
            ReplicaError: Some have not in time, or waiting has become pointless.
        """
        deadline = time.monotonic() + timeout_s
        with self._news:
            while len(self._joined) < self._size - 1:
                if interrupted():
                    raise ReplicaError(f"{self._name}: told to stop while its other processes were awaited")
                if time.monotonic() > deadline:
                    absent = [rank for rank in range(1, self._size) if rank not in self._joined]
                    raise ReplicaError(
                        f"{self._name}: ranks {absent} of {self._size} did not appear within {timeout_s:g} s; see "
                        f"logs/{self._name}.{absent[0]}.log"
                    )
                self._news.wait(_POLL_S)

    def abandon(self, generation: int) -> None:
        """Let the followers stop waiting for the gradient group of a generation."""
        if generation > self.abandoned:
            self.abandoned = generation
            self._tell(Abandon(generation=generation))

    def goodbye(self) -> None:
        """Wait until every follower has done its work, and let them go.

        Raises:
            ReplicaError: Some have not finished in time.
        """
        with self._news:
            if not self._news.wait_for(lambda: all(wire.has_left for wire in self._joined.values()), _GOODBYE_S):
                busy = [rank for rank, wire in self._joined.items() if not wire.has_left]
                raise ReplicaError(
                    f"{self._name}: ranks {busy} have not finished within {_GOODBYE_S:g} s of the leader"
                )
            self._is_over = True
        self._tell(Goodbye())
        self._thread.join()

    def fail(self, failure: Failure) -> End:
        """Tell the followers; what ends the replica."""
        self._end_soon()
        with self._news:
            self._failures.append(failure)
            self._is_main_waiting = True
            self._news.wait_for(lambda: self._cause)
            # Once the thread has begun to end this process, it alone does.
            self._news.wait_for(lambda: not self._is_ending)
            cause = self._cause
        assert cause is not None, "it was waited for"
        return End(reason=failure.reason) if cause.reason == self._words(failure) else cause

    def _run(self) -> None:
        pinged_at = looked_at = time.monotonic()
        while not self._is_over:
            self._look()
            now = time.monotonic()
            if now - looked_at > _PAUSE_S:
                for wire in self._joined.values():
                    wire.heard_at += now - looked_at
            looked_at = now
            if now - pinged_at >= _PING_S:
                pinged_at = now
                self._tell(Ping())
                self._miss(now)
            if self._failures:
                self._finish()
                return
        for key in [*self._selector.get_map().values()]:
            self._selector.unregister(key.fileobj)
            (key.data or self._server).close()
        self._selector.close()

    def _miss(self, now: float) -> None:
        """Note followers that have not answered for too long."""
        for wire in self._joined.values():
            if not wire.has_left and now - wire.heard_at > self._patience_s:
                self._note(
                    f"its process (pid {wire.pid}) has been silent for {self._patience_s:g} s (control.lost_after_s): "
                    "stopped, or its machine cannot be reached",
                    wire.rank,
                )

    def _look(self) -> None:
        """Take in what arrives within a moment."""
        for key, _ in self._selector.select(_POLL_S):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                self._selector.register(connection, selectors.EVENT_READ, Wire(connection))
            else:
                self._read(key.data)

    def _read(self, wire: Wire) -> None:
        try:
            messages = wire.receive()
        except TransportError:
            messages = None
        for message in messages or ():
            self._take(wire, message)
        if messages is None:
            self._drop(wire)
            if wire.rank > LEADER and not wire.has_left:
                self._note(f"its process (pid {wire.pid}) ended without a word: killed, or out of memory?", wire.rank)

    def _take(self, wire: Wire, message: Message) -> None:
        match message:
            case Join() if message.token == self._token and message.rank in self._joined:
                _LOG.warning("%s: a second process says that it is rank %d; closed", self._name, message.rank)
                self._drop(wire)
            case Join() if message.token == self._token and wire.rank < LEADER < message.rank < self._size:
                with self._news:
                    wire.rank, wire.pid = message.rank, message.pid
                    self._joined[message.rank] = wire
                    self._news.notify_all()
            case Failure() if message.rank == wire.rank:
                with self._news:
                    wire.has_left = True
                    self._failures.append(message)
            case Ping() if wire.rank > LEADER:
                pass
            case Goodbye() if wire.rank > LEADER:
                with self._news:
                    wire.has_left = True
                    self._news.notify_all()
            case _:
                _LOG.warning("%s: a connection that is not of this start of the run was closed", self._name)
                self._drop(wire)

    def _drop(self, wire: Wire) -> None:
        if wire.connection.fileno() >= 0:
            self._selector.unregister(wire.connection)
            wire.close()

    def _note(self, reason: str, rank: int) -> None:
        with self._news:
            self._failures.append(Failure(rank=rank, reason=reason, time=time.time(), is_echo=False, is_loss=True))

    def _finish(self) -> None:
        """Find the failure that came first, tell everybody, and end unless the main thread does."""
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            self._look()
        with self._news:
            first = min(self._failures, key=lambda failure: (failure.is_echo, failure.time))
            cause = End(reason=self._words(first), is_loss=first.is_loss)
        self._tell(cause)
        with self._news:
            self._cause = cause
            self._is_ending = not self._is_main_waiting
            self._news.notify_all()
        if self._is_ending:
            self._end(_error_of(cause))

    def _words(self, failure: Failure) -> str:
        return f"{self._name} rank {failure.rank}: {failure.reason}"

    def _tell(self, message: Message) -> None:
        with self._news:
            for wire in self._joined.values():
                wire.send(message)


class FollowerLine(Lifeline):
    """A follower's end.

    Args:
        name: The replica's name.
        rank: This process's place in it.
        token: What shows that it belongs to this start of the run.
        address: Host and port of the leader.
        end: Called on a thread of this object when the replica ends because of another process.
        patience_s: Silence after which the leader is frozen, or its machine gone.

    Raises:
        ReplicaError: The leader cannot be reached.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        token: str,
        address: tuple[str, int],
        end: Ender,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__()
        self._patience_s: Final = patience_s
        self._name: Final = name
        self._rank: Final = rank
        self._end: Final = end
        try:
            self._wire: Final = Wire(socket.create_connection(address, _ANSWER_S), LEADER)
        except OSError as error:
            raise ReplicaError(f"{name}: its leader at {address[0]}:{address[1]} cannot be reached: {error}") from error
        self._news: Final = threading.Condition()
        self._is_main_waiting = False
        self._wire.send(Join(rank=rank, token=token, pid=os.getpid()))
        self._thread: Final = threading.Thread(target=self._run, name="lifeline", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This process's place in the replica."""
        return self._rank

    def goodbye(self) -> None:
        """Tell the leader that the work is done, and wait until all have.

        Raises:
            ReplicaError: The leader did not answer in time.
        """
        self._wire.send(Goodbye())
        self._thread.join(_GOODBYE_S)
        if self._thread.is_alive():
            raise ReplicaError(f"{self._name}: the leader did not say goodbye within {_GOODBYE_S:g} s")
        self._wire.close()

    def fail(self, failure: Failure) -> End:
        """Tell the leader; what ends the replica."""
        self._end_soon()
        with self._news:
            self._is_main_waiting = True
        self._wire.send(failure)
        with self._news:
            self._news.wait_for(lambda: self._cause, _ANSWER_S)
            cause = self._cause
        own = f"{self._name} rank {failure.rank}: {failure.reason}"
        return End(reason=failure.reason) if cause is None or cause.reason == own else cause

    def _run(self) -> None:
        looked_at = time.monotonic()
        while True:
            messages = self._receive()
            now = time.monotonic()
            if now - looked_at > _PAUSE_S:
                self._wire.heard_at += now - looked_at
            looked_at = now
            if messages is not None and now - self._wire.heard_at > self._patience_s:
                silent = f"its process, the leader, has been silent for {self._patience_s:g} s (control.lost_after_s)"
                self._finish(End(reason=f"{self._name} rank {LEADER}: {silent}", is_loss=True))
                return
            if messages is None:
                gone = f"{self._name} rank {LEADER}: its process, the leader, is gone"
                self._finish(End(reason=gone, is_loss=True))
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
                        self._wire.send(Ping())
                    case _:
                        pass

    def _receive(self) -> list[Message] | None:
        try:
            return self._wire.receive()
        except TransportError:
            return None

    def _finish(self, cause: End) -> None:
        self._wire.close()
        with self._news:
            self._cause = cause
            self._news.notify_all()
            is_main_waiting = self._is_main_waiting
        if not is_main_waiting:
            self._end(_error_of(cause))


def _error_of(cause: End) -> ReplicaError:
    return ProcessLostError(cause.reason) if cause.is_loss else ReplicaError(cause.reason)


def words_of(error: BaseException) -> str:
    """An error in words; of a RuntimeError from another error, which torch's pipelines raise, those of the other."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) if isinstance(error, CosmosError) else f"{type(error).__name__}: {error}"


def _failure_of(error: Exception, rank: int) -> Failure:
    """An error of `torch.distributed`, which is a RuntimeError, may be no more than another process's end."""
    chain = [error, *filter(None, [error.__cause__])]
    return Failure(
        rank=rank,
        reason=words_of(error),
        time=time.time(),
        is_echo=any(isinstance(each, RuntimeError) for each in chain),
    )


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host} ({error.strerror or error}); set control.bind to an address of this machine"
        ) from error
