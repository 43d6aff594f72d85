"""Reports and directives across a wire that loses, repeats and reorders, and across restarts of either end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import pytest
import zmq

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.client import ControlClient
from cosmos_core.transport.messages import DOWN, UP, Acknowledged, Beat, Directive, Hello, Refused, Reports, Welcome
from cosmos_core.transport.outbox import Outbox
from cosmos_core.transport.reports import REPORT, CheckpointSaved
from cosmos_core.transport.sockets import Socket, address_of, dealer, offer, receive, router

HELLO = Hello(
    wire=1, run_id="run", name="rollout-0", role="rollout", incarnation="a", host="here", pid=1, step=0, endpoints={}
)


def retry(make: Callable[[], Socket]) -> Socket:
    """Bind to a port that libzmq may still be closing."""
    end = time.monotonic() + 5
    while True:
        try:
            return make()
        except TransportError:
            assert time.monotonic() < end
            time.sleep(0.01)


class Loop(threading.Thread):
    """A thread that owns sockets; an error in it fails the test that joins it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.context = zmq.Context()
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.turn()
        except BaseException as error:  # noqa: BLE001 - given to the test
            self.error = error

    def turn(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopping.set()
        self.join()
        self.context.destroy(linger=0)
        if self.error is not None:
            raise self.error


class Controller(Loop):
    """A controller that makes reports durable in `journal`, a dict that outlives it; it starts with a higher term."""

    def __init__(self, journal: dict[str, list[int]], term: int, port: int = 0) -> None:
        super().__init__()
        self.journal = journal
        self.term = term
        self.revision = 0
        self.members: dict[str, str] = {}
        self.known: dict[str, int] = {}
        self.socket = retry(lambda: router(self.context, "127.0.0.1", port))
        self.address = address_of(self.socket)
        self.start()

    def turn(self) -> None:
        if not self.socket.poll(20):
            return
        identity, data = receive(self.socket, 2)
        message = UP.decode(data)
        incarnation = message.incarnation
        current = self.members.get(message.name)
        if isinstance(message, Hello):
            self.members[message.name] = incarnation
            self.known[incarnation] = 0
            self.journal.setdefault(incarnation, [])
            self.reply(identity, Welcome(term=self.term, acknowledged=len(self.journal[incarnation])))
        elif current not in (None, incarnation):
            self.reply(identity, Refused(reason=f"{current} took over"))
        elif message.term != self.term or current is None:
            self.reply(identity, Acknowledged(term=self.term, acknowledged=len(self.journal.get(incarnation, []))))
        elif isinstance(message, Reports):
            self.accept(identity, message)
        elif isinstance(message, Beat):
            self.known[incarnation] = message.revision
            if self.revision > message.revision:
                acknowledged = len(self.journal[incarnation])
                self.reply(identity, Directive(term=self.term, revision=self.revision, acknowledged=acknowledged))

    def accept(self, identity: bytes, message: Reports) -> None:
        accepted = self.journal[message.incarnation]
        for number, data in enumerate(message.reports, start=message.first):
            if number == len(accepted) + 1:
                accepted.append(REPORT.decode(data).step)
        self.reply(identity, Acknowledged(term=self.term, acknowledged=len(accepted)))

    def reply(self, identity: bytes, message: object) -> None:
        offer(self.socket, [identity, DOWN.encode(message)])


class LossyProxy(Loop):
    """Between replicas and their controller: loses, repeats and reorders each frame, each way."""

    def __init__(self, address: str, seed: int, *, rate: float) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.rate = rate
        self.target = address
        self.front = router(self.context, "127.0.0.1", 0)
        self.backs: dict[bytes, Socket] = {}
        self.held: list[tuple[Socket, list[bytes]]] = []
        self.address = address_of(self.front)
        self.start()

    def turn(self) -> None:
        self.front.poll(5)
        for _ in range(50):
            try:
                identity, data = receive(self.front, 2)
            except zmq.Again:
                break
            if identity not in self.backs:
                self.backs[identity] = dealer(self.context, self.target, identity, queued=True)
            self.forward(self.backs[identity], [data])
        for identity, back in self.backs.items():
            while back.poll(0):
                self.forward(self.front, [identity, *receive(back, 1)])
        self.rng.shuffle(self.held)
        while self.held and self.rng.random() < 0.5:
            offer(*self.held.pop())

    def forward(self, socket: Socket, parts: list[bytes]) -> None:
        if self.rng.random() < self.rate:
            return
        for _ in range(2 if self.rng.random() < self.rate else 1):
            if self.rng.random() < self.rate:
                self.held.append((socket, parts))
            else:
                offer(socket, parts)


@pytest.fixture
def journal() -> dict[str, list[int]]:
    return {}


@pytest.fixture
def start() -> Iterator[Callable[..., Loop]]:
    """Start a loop, and stop it after the test."""
    started: list[Loop] = []

    def start(make: Callable[[], Loop]) -> Loop:
        started.append(make())
        return started[-1]

    yield start
    for loop in reversed(started):
        if not loop.stopping.is_set():
            loop.stop()


@pytest.mark.parametrize("seed", range(3))
def test_every_report_arrives_once_and_in_order_across_a_lossy_wire(start, journal, seed):
    controller = start(lambda: Controller(journal, term=1))
    proxy = start(lambda: LossyProxy(controller.address, seed, rate=0.3))
    with ControlClient(proxy.address, HELLO, 0.1, outbox=Outbox(window=64)) as client:
        for step in range(120):
            client.report(CheckpointSaved(step=step, path="p"))
            time.sleep(0.001 if step % 3 else 0.0)
        assert client.flush(60)
        client.check()
    assert journal["a"] == list(range(120))


def test_the_newest_directive_arrives_across_a_lossy_wire(start, journal):
    controller = start(lambda: Controller(journal, term=1))
    proxy = start(lambda: LossyProxy(controller.address, 1, rate=0.3))
    with ControlClient(proxy.address, HELLO, 0.05) as client:
        seen = 0
        for revision in range(1, 6):
            controller.revision = revision
            while seen < revision:
                directive = client.wait_directive(seen, 30)
                assert directive is not None
                assert directive.revision > seen
                seen = directive.revision
        end = time.monotonic() + 30
        while controller.known["a"] != 5:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_reports_outlive_four_controllers(start, journal):
    controller = start(lambda: Controller(journal, term=1))
    port = int(controller.address.rpartition(":")[2])
    with ControlClient(controller.address, HELLO, 0.1) as client:
        step = 0
        for term in range(2, 6):
            end = time.monotonic() + 0.15
            while time.monotonic() < end:
                client.report(CheckpointSaved(step=step, path="p"))
                step += 1
                time.sleep(0.001)
            controller.stop()
            client.report(CheckpointSaved(step=step, path="p"))
            step += 1
            controller = start(lambda term=term: Controller(journal, term, port))
        controller.revision = 1
        assert client.flush(30)
        directive = client.wait_directive(0, 10)
        assert (directive.term, directive.revision) == (5, 1)
    assert journal["a"] == list(range(step))


def test_a_replica_that_restarts_numbers_its_reports_anew_and_its_ghost_is_refused(start, journal):
    controller = start(lambda: Controller(journal, term=1))
    with ControlClient(controller.address, HELLO, 0.1) as ghost:
        ghost.report(CheckpointSaved(step=1, path="p"))
        assert ghost.flush(10)
        with ControlClient(controller.address, attrs.evolve(HELLO, incarnation="b"), 0.1) as client:
            client.report(CheckpointSaved(step=10, path="p"))
            assert client.flush(10)
            ghost.report(CheckpointSaved(step=2, path="p"))
            assert not ghost.flush(10)
            with pytest.raises(ReplicaError, match="b took over"):
                ghost.check()
            client.report(CheckpointSaved(step=11, path="p"))
            assert client.flush(10)
            client.check()
    assert journal == {"a": [1], "b": [10, 11]}
