"""The leader's end of a replica's health channel."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.replica.health_channel import (
    GOODBYE_S,
    LEADER,
    PATIENCE_S,
    PAUSE_S,
    Abandon,
    Connection,
    End,
    Ender,
    Failure,
    Goodbye,
    HealthChannel,
    Join,
    Message,
    Ping,
    error_of,
)

_LOG: Final = logging.getLogger(__name__)

_SETTLE_S: Final = 0.2
"""How long news of other failures is awaited after the first: an echo may arrive before what it is the echo of."""
_LINGER_S: Final = 1.0
"""How long followers are given to close their ends."""
_JOIN_S: Final = 10.0
"""How long a connection may take to say who it is."""
_MOST_STRANGERS: Final = 64
"""Connections that have not said so yet, beside those of the followers; a newer one takes the place of the oldest."""
_POLL_S: Final = 0.1
_PING_S: Final = 1.0


class LeaderChannel(HealthChannel):
    """The leader's end: it listens from the start, `meet` waits for the followers, who know `token`."""

    def __init__(
        self, *, name: str, size: int, token: str, host: str, end: Ender, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__()
        self._patience_s: Final = patience_s
        self._name: Final = name
        self._size: Final = size
        self._token: Final = token
        self._end: Final = end
        self._server: Final = listen(host)
        self._news: Final = threading.Condition()
        self._joined: Final[dict[int, Connection]] = {}
        self._strangers: Final[deque[Connection]] = deque()
        self._failures: Final[list[Failure]] = []
        self._refused = RepeatedWarning(__name__)
        self._is_main_waiting = False
        self._is_ending = False
        self._is_over = False
        self._selector: Final = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread: Final = threading.Thread(target=self._run, name="health-channel", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the leader listens on."""
        return int(self._server.getsockname()[1])

    def meet(self, timeout_s: float, interrupted: Callable[[], bool]) -> None:
        """Wait until every follower has joined."""
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
        """Wait until every follower has done its work, and let them go."""
        with self._news:
            if not self._news.wait_for(
                lambda: all(connection.has_left for connection in self._joined.values()), GOODBYE_S
            ):
                busy = [rank for rank, connection in self._joined.items() if not connection.has_left]
                raise ReplicaError(f"{self._name}: ranks {busy} have not finished within {GOODBYE_S:g} s of the leader")
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
            # By when it looked before: what lay unread while this process did not run is no silence.
            while self._strangers and looked_at - self._strangers[0].began_at > _JOIN_S:
                self._drop(self._strangers[0])
            if now - looked_at > PAUSE_S:
                for connection in self._joined.values():
                    connection.heard_at += now - looked_at
            if now - pinged_at >= _PING_S:
                pinged_at = now
                self._tell(Ping())
                self._miss(looked_at)
            looked_at = now
            if self._failures:
                self._finish()
                return
        self._linger()
        for key in [*self._selector.get_map().values()]:
            self._selector.unregister(key.fileobj)
            (key.data or self._server).close()
        self._selector.close()

    def _miss(self, by: float) -> None:
        """Note followers that had not answered for too long by then."""
        for connection in self._joined.values():
            if not connection.has_left and by - connection.heard_at > self._patience_s:
                self._note(
                    f"its process (pid {connection.pid}) has been silent for {self._patience_s:g} s "
                    "(control.lost_after_s): stopped, or its machine cannot be reached",
                    connection.rank,
                )

    def _look(self) -> None:
        """Take in what arrives within a moment."""
        for key, _ in self._selector.select(_POLL_S):
            if key.fileobj is self._server:
                self._accept()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        try:
            connection = Connection(self._server.accept()[0])
        except OSError as error:  # it is gone already, or this process has no more descriptors
            self._refused("%s: a connection of its processes could not be taken: %s", self._name, error)
            if self._strangers:
                self._drop(self._strangers[0])
            time.sleep(_POLL_S)
            return
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._strangers.append(connection)
        if len(self._strangers) > self._size + _MOST_STRANGERS:
            self._drop(self._strangers[0])

    def _read(self, connection: Connection) -> None:
        try:
            messages = connection.receive()
        except TransportError:
            messages = None
        for message in messages or ():
            if connection.socket.fileno() >= 0:  # what came with a message that it was closed for is nobody's
                self._take(connection, message)
        if messages is None:
            self._drop(connection)
            if connection.rank > LEADER and not connection.has_left:
                why = f"its process (pid {connection.pid}) ended without a word: killed, or out of memory?"
                self._note(why, connection.rank)

    def _take(self, connection: Connection, message: Message) -> None:
        match message:
            case Join() if self._is_token(message.token) and message.rank in self._joined:
                _LOG.warning("%s: a second process says that it is rank %d; closed", self._name, message.rank)
                self._drop(connection)
            case Join() if self._is_token(message.token) and connection.rank < LEADER < message.rank < self._size:
                self._strangers.remove(connection)
                with self._news:
                    connection.rank, connection.pid = message.rank, message.pid
                    self._joined[message.rank] = connection
                    self._news.notify_all()
            case Failure() if LEADER < connection.rank == message.rank:
                with self._news:
                    connection.has_left = True
                    self._failures.append(message)
            case Ping() if connection.rank > LEADER:
                pass
            case Goodbye() if connection.rank > LEADER:
                with self._news:
                    connection.has_left = True
                    self._news.notify_all()
            case _:
                self._refused("%s: a connection that is not of this start of the run was closed", self._name)
                self._drop(connection)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _drop(self, connection: Connection) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.socket.fileno() >= 0:
            self._selector.unregister(connection.socket)
            connection.close()

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
        self._linger()
        with self._news:
            self._cause = cause
            self._is_ending = not self._is_main_waiting
            self._news.notify_all()
        if self._is_ending:
            self._end(error_of(cause))

    def _linger(self) -> None:
        """Read until followers have closed, as they do at the last word.

        To close a connection in which something lies unread resets it, and the last word could be lost.
        """
        until = time.monotonic() + _LINGER_S
        while time.monotonic() < until and any(connection.socket.fileno() >= 0 for connection in self._joined.values()):
            self._look()

    def _words(self, failure: Failure) -> str:
        return f"{self._name} rank {failure.rank}: {failure.reason}"

    def _tell(self, message: Message) -> None:
        with self._news:
            for connection in self._joined.values():
                connection.send(message)


def listen(host: str) -> socket.socket:
    """Listen on a free port of an address of this machine; a TransportError says that it has no such address."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host} ({error.strerror or error}); set control.bind to an address of this machine"
        ) from error
