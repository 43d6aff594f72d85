"""The real server in a process of its own, and replicas in a few others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import attrs
import zmq
from control.crowd import BEAT_S, Said, replicate
from control.opening import opened, settings
from control.replica import POLICY

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.state import State
from cosmos_core.control.recovery_snapshots import RecoverySnapshots
from cosmos_core.control.server import Server
from cosmos_core.transport import sockets
from cosmos_core.transport.authentication import listen

RATE = 400.0
"""Messages with results that all replicas together send a second, if they can."""
CLIENTS = 4
_PAGE_MB: Final = os.sysconf("SC_PAGE_SIZE") / 2**20


@attrs.frozen(kw_only=True)
class Taken:
    """What the server's process had taken at one moment, and how far it had come."""

    cpu_s: float
    at_s: float
    resident_mb: float
    rollouts: int


@attrs.frozen(kw_only=True)
class Served:
    """A server's process: when it listened, when all had joined and worked for a while, and at the end."""

    listening: Taken
    begun: Taken
    ended: Taken
    join_s: float
    """Wall time until all had joined."""

    @property
    def cpu_s(self) -> float:
        """CPU while it was measured."""
        return self.ended.cpu_s - self.begun.cpu_s

    @property
    def wall_s(self) -> float:
        """How long it was measured."""
        return self.ended.at_s - self.begun.at_s

    @property
    def rollouts(self) -> int:
        """Accounted for while it was measured."""
        return self.ended.rollouts - self.begun.rollouts

    @property
    def start_cpu_s(self) -> float:
        """CPU for all to join, to load weights and to get their first leases."""
        return self.begun.cpu_s - self.listening.cpu_s

    @property
    def replicas_mb(self) -> float:
        """Memory of all replicas and their connections."""
        return self.begun.resident_mb - self.listening.resident_mb

    @property
    def growth_mb(self) -> float:
        """By how much memory grew while it was measured."""
        return self.ended.resident_mb - self.begun.resident_mb


def serve(num_replicas: int, folder: str, line: Connection) -> None:
    """The server's process: tell the address, tell at each word what it has taken, until the word is `end`."""
    control = ControlConfig(heartbeat_s=BEAT_S, lost_after_s=600.0, join_timeout_s=600.0)
    with zmq.Context() as context, Journal(Path(folder) / "journal.sqlite") as journal:
        context.set(zmq.MAX_SOCKETS, 20_000)
        state = opened(journal, settings(num_replicas, 1))
        listener = listen(context, "127.0.0.1", 0, sockets.CONTROL)
        server = Server(state, journal, listener, control, RecoverySnapshots(Path(folder) / "recovery", keep=1))
        try:
            line.send(sockets.address_of(listener.socket))
            line.send(_taken(state))
            word = ""
            while word != "end":
                listener.socket.poll(100)
                server.turn()
                word = line.recv() if line.poll() else ""
                if word:
                    line.send(_taken(state))
        finally:
            listener.close(linger_ms=0)


def _taken(state: State) -> Taken:
    return Taken(
        cpu_s=time.process_time(),
        at_s=time.monotonic(),
        resident_mb=int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_MB,
        rollouts=state.ledger.samples.generated,
    )


@attrs.frozen
class Measured:
    """A server and its replicas."""

    num_replicas: int
    served: Served
    said: Said

    @property
    def lease_ms(self) -> tuple[float, float]:
        """Of a lease: the median, and what one in a hundred takes longer than."""
        ordered = sorted(self.said.lease_s) or [0.0]
        return ordered[len(ordered) // 2] * 1e3, ordered[len(ordered) * 99 // 100] * 1e3


def measure(num_replicas: int, seconds: float) -> Measured:
    """A server, and replicas in a few processes."""
    names = [POLICY, *(f"rollout-{index}" for index in range(num_replicas))]
    shares = [share for index in range(CLIENTS) if (share := names[index::CLIENTS])]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        served = stack.enter_context(_process(context, serve, num_replicas, folder))
        address, listening = served.recv(), served.recv()
        period_s = num_replicas / RATE
        crowds = [stack.enter_context(_process(context, replicate, address, share, period_s)) for share in shares]
        joins = [crowd.recv() for crowd in crowds]
        # Everybody's turn has come once: all have weights and leases.
        time.sleep(max(1.0, period_s))
        for crowd in crowds:
            crowd.send("begin")
        served.send("begin")
        begun = served.recv()
        time.sleep(max(seconds, 2 * period_s))
        served.send("end")
        ended = served.recv()
        for crowd in crowds:
            crowd.send("end")
        said = [crowd.recv() for crowd in crowds]
        everything = Said(
            messages=sum(each.messages for each in said),
            results=sum(each.results for each in said),
            lease_s=[lease for each in said for lease in each.lease_s],
        )
        found = Served(listening=listening, begun=begun, ended=ended, join_s=max(joins))
        return Measured(num_replicas, found, everything)


@contextlib.contextmanager
def _process(context: multiprocessing.context.SpawnContext, target: object, *arguments: object) -> Iterator[Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join(timeout=20)
        process.kill()
