"""Requests of people and supervisors to the controller of a run that goes on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.run.address import absence, find_address
from cosmos_core.run.observer import Connection, Observer
from cosmos_core.transport import sockets
from cosmos_core.transport.keys import Key, person_key
from cosmos_core.transport.messages import (
    DOWN,
    REQUEST,
    UP,
    Answer,
    Command,
    Down,
    Inquire,
    Refused,
    Request,
    Settable,
    Up,
)

_AGAIN_S: Final = 1.0


class PendingRequests:
    """Requests without an answer, each with a name of its own, under which it is carried out once."""

    def __init__(self) -> None:
        self._pending: Final[dict[str, Request]] = {}
        self._sent_at = float("-inf")

    def add(self, request: Request) -> str:
        """Ask for something from now on; the name under which it will be answered (`Observer.answers`)."""
        ident = secrets.token_hex(8)
        self._pending[ident] = request
        self._sent_at = float("-inf")
        return ident

    def send(self, observer: Observer, now: float) -> None:
        """Send what has not been answered, when it is time."""
        for ident in self._pending.keys() & observer.answers.keys():
            del self._pending[ident]
        if self._pending and now - self._sent_at > _AGAIN_S:
            self._sent_at = now
            for ident, request in self._pending.items():
                observer.ask(request, ident)


T = TypeVar("T")

_ANSWER_S: Final = 10.0
_POLL_MS: Final = 50


class ControllerClient(Connection):
    """Says one thing after another, and waits for what the controller says to it."""

    def __init__(self, address: str, run_id: str, key: Key) -> None:
        self._address: Final = address
        self._run_id: Final = run_id
        super().__init__("asker", address, key)

    def settable(self) -> Settable:
        """The settings that can change in the run, as they are now."""
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


def address_of(directory: Path, job: Job) -> str:
    """The address of a run's controller; raises ReplicaError if the run does not go on."""
    address = find_address(job)
    if address is None:
        raise ReplicaError(f"{directory}: the run does not go on ({absence(job)}), so that nothing can be asked")
    return address


def ask(directory: Path, request: Request) -> None:
    """Ask a run, and return once the request is in its journal.

    Raises:
        CosmosError: It is no run.
        ReplicaError: It does not go on, does not answer, or refuses; the message says why.
    """
    with controller_client(directory, load_job(directory)) as controller:
        refusal = controller.ask(request)
    if refusal:
        raise ReplicaError(f"{directory}: refused: {refusal}")


def controller_client(directory: Path, job: Job) -> ControllerClient:
    """A connection to the controller of a run, for who may ask it for something."""
    return ControllerClient(address_of(directory, job), job.run_id, person_key(job.keys, may_ask=True))
