"""A connection to the controller for questions and requests. It does not watch the run, however long that is."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

import zmq

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.transport import sockets
from cosmos_core.transport.door.handshakes import EVENTS as HANDSHAKES
from cosmos_core.transport.door.handshakes import Handshakes
from cosmos_core.transport.keys import Key
from cosmos_core.transport.messages import Answer, Command, Down, Inquire, Refused, Settable, Up
from cosmos_core.transport.requests import Request
from cosmos_core.transport.wire import DOWN, REQUEST, UP

T = TypeVar("T")

_ANSWER_S: Final = 10.0
_AGAIN_S: Final = 1.0
_POLL_MS: Final = 50


class Conversation:
    """Says one thing after another, and waits for what the controller says to it.

    Args:
        address: `tcp://HOST:PORT` of the controller.
        run_id: The run's id.
        key: Of whoever asks.
    """

    def __init__(self, address: str, run_id: str, key: Key) -> None:
        self._address: Final = address
        self._run_id: Final = run_id
        self._context: Final = zmq.Context()
        identity = f"asker-{secrets.token_hex(8)}".encode()
        curve = sockets.Curve(own=key.pair, server=key.server)
        self._socket: Final = sockets.dealer(self._context, address, identity, curve=curve, events=HANDSHAKES)
        self._handshakes: Final = Handshakes(self._socket, address)

    def settable(self) -> Settable:
        """What can be set in the run, as it is now.

        Raises:
            ReplicaError: The controller does not answer.
            TransportError: It refuses whoever asks.
        """
        return self._exchange(Inquire(run_id=self._run_id), lambda said: said if isinstance(said, Settable) else None)

    def ask(self, request: Request) -> str:
        """Ask the run for something; why it was refused, empty once it is in the journal.

        Raises:
            ReplicaError: The controller does not answer.
            TransportError: It refuses whoever asks.
        """
        command = Command(run_id=self._run_id, ident=secrets.token_hex(8), request=REQUEST.encode(request))

        def refusal(said: Down) -> str | None:
            return said.refusal if isinstance(said, Answer) and said.ident == command.ident else None

        return self._exchange(command, refusal)

    def close(self) -> None:
        """Close the connection."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, message: Up, wanted: Callable[[Down], T | None]) -> T:
        """Say something, again every second, until what is wanted is said."""
        due, deadline = 0.0, time.monotonic() + _ANSWER_S
        while (now := time.monotonic()) < deadline:
            # What finds no connection yet is not taken, and tried again at once.
            if now >= due and sockets.offer(self._socket, [UP.encode(message)]):
                due = now + _AGAIN_S
            if self._socket.poll(_POLL_MS) and (found := self._receive(wanted)) is not None:
                return found
            self._handshakes.check()
        raise ReplicaError(
            f"the controller at {self._address} has not answered within {_ANSWER_S:g} s; it hangs, or is stopped (see "
            "logs/controller.log in the run's folder)"
        )

    def _receive(self, wanted: Callable[[Down], T | None]) -> T | None:
        said = DOWN.decode(sockets.receive(self._socket, parts=1)[0])
        if isinstance(said, Refused):
            raise TransportError(f"the controller refuses: {said.reason}")
        return wanted(said)
