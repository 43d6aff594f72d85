"""A follower's end of a replica's lifeline."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Final

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.lifeline.line import (
    ANSWER_S,
    GOODBYE_S,
    LEADER,
    PATIENCE_S,
    PAUSE_S,
    Ender,
    Lifeline,
    error_of,
)
from cosmos_core.replica.wire import Abandon, End, Failure, Goodbye, Join, Message, Ping, Wire


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
            self._wire: Final = Wire(socket.create_connection(address, ANSWER_S), LEADER)
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
        self._thread.join(GOODBYE_S)
        if self._thread.is_alive():
            raise ReplicaError(f"{self._name}: the leader did not say goodbye within {GOODBYE_S:g} s")
        self._wire.close()

    def fail(self, failure: Failure) -> End:
        """Tell the leader; what ends the replica."""
        self._end_soon()
        with self._news:
            self._is_main_waiting = True
        self._wire.send(failure)
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
                self._wire.heard_at += now - looked_at
            # By when it looked before: what lies unread since this process did not run is no silence.
            is_silent = looked_at - self._wire.heard_at > self._patience_s
            looked_at = now
            if messages is not None and is_silent:
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
            self._end(error_of(cause))
