"""Replicas in a process, each with its own connection: they join, beat, and report results when their turn comes."""

from __future__ import annotations

import contextlib
import heapq
import time
from multiprocessing.connection import Connection

import attrs
import zmq
from control.replica import BATCH, POLICY, Replica

from cosmos_core.transport import sockets

BEAT_S = 1.0


@attrs.define
class Said:
    """What replicas said while it was measured, and how long leases took, in seconds."""

    messages: int = 0
    results: int = 0
    lease_s: list[float] = attrs.field(factory=list)


def replicate(address: str, names: list[str], period_s: float, line: Connection) -> None:
    """A process with some of the replicas: join, tell how long it took, work until told to stop, tell what was said."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 20_000)
        Crowd(context, address, names, period_s).run(line)


class Crowd:
    """Some replicas, each with its own connection."""

    def __init__(self, context: sockets.Context, address: str, names: list[str], period_s: float) -> None:
        self._period_s = period_s
        self._replicas = {name: Replica(name, 1) for name in names}
        self._sockets = {name: sockets.dealer(context, address, name.encode(), queued=True) for name in names}
        self._names = {socket: name for name, socket in self._sockets.items()}
        self._asked_at: dict[str, float] = {}
        self._said = Said()

    def run(self, line: Connection) -> None:
        """Until told to stop."""
        poller = zmq.Poller()
        for socket in self._names:
            poller.register(socket, zmq.POLLIN)
        began = now = time.monotonic()
        # Spread over time, as they would be.
        due = [(now + index * BEAT_S / len(self._replicas), name, "beat") for index, name in enumerate(self._replicas)]
        due += [
            (now + index * self._period_s / len(self._replicas), name, "results")
            for index, name in enumerate(self._replicas)
            if name != POLICY
        ]
        heapq.heapify(due)
        for name, replica in self._replicas.items():
            sockets.offer(self._sockets[name], [replica.hello()])
        word, has_joined = "", False
        try:
            while word != "end":
                self._rest(poller, due)
                if not has_joined and all(replica.term for replica in self._replicas.values()):
                    has_joined = True
                    line.send(time.monotonic() - began)
                word = line.recv() if line.poll() else ""
                if word == "begin":
                    self._said = Said()
        finally:
            for socket in self._names:
                socket.close(linger=0)
        line.send(self._said)

    def _rest(self, poller: zmq.Poller, due: list[tuple[float, str, str]]) -> None:
        for socket, _ in poller.poll(max(0.0, (due[0][0] - time.monotonic()) * 1000)):
            self._hear(self._names[socket], socket)
        while due[0][0] <= time.monotonic():
            self._act(due)

    def _act(self, due: list[tuple[float, str, str]]) -> None:
        at, name, what = due[0]
        replica, now = self._replicas[name], time.monotonic()
        period_s = BEAT_S if what == "beat" else self._period_s
        heapq.heapreplace(due, (max(at + period_s, now), name, what))
        if what == "beat" and replica.term:
            self._say(name, replica.beat())
        elif what == "results" and len(replica.leases) >= BATCH and name not in self._asked_at:
            self._say(name, replica.results())
            self._said.results += BATCH
            self._asked_at[name] = now

    def _hear(self, name: str, socket: sockets.Socket) -> None:
        replica = self._replicas[name]
        with contextlib.suppress(zmq.Again):
            while True:
                before = len(replica.leases)
                for data in replica.hear(sockets.receive(socket, 1)[0]):
                    self._say(name, data)
                if len(replica.leases) > before and name in self._asked_at:
                    self._said.lease_s.append(time.monotonic() - self._asked_at.pop(name))

    def _say(self, name: str, data: bytes) -> None:
        sockets.offer(self._sockets[name], [data])
        self._said.messages += 1
