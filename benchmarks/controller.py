"""What one controller can do: rollouts accounted for durably, and thousands of simulated replicas at its socket.

    python benchmarks/controller.py [--replicas 1 100 1000] [--seconds 10] [--out benchmarks/results/controller-cpu]

Accounting: the real desk and the real journal on one core, eight results a message, without sockets. CPU is that of
decoding, the state machine, the commit, and encoding what is said; that of the replicas is not counted.
Sockets: the real server in a process of its own and replicas in others, each with its own connection, heartbeats and
leases. They take no time to generate: each reports a message of eight results when its turn comes, so that all of them
together say as much a second whatever their number, as far as the machine can. A lease takes from sending such a
message to the directive with the next leases. CPU is the server's, of its process; so is the memory.
Every rollout is a prompt of its own (groups of one sample) unless a row says otherwise: that is the dearest case.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import zmq
from rich.console import Console
from rich.table import Table

from cosmos_core.config.schema import ControlConfig
from cosmos_core.controller.accounts import Accounts
from cosmos_core.controller.desk import Desk
from cosmos_core.controller.journal import Journal
from cosmos_core.controller.machine import core
from cosmos_core.controller.machine.events import ControllerStarted, RunOpened
from cosmos_core.controller.machine.settings import Settings, StageSettings
from cosmos_core.controller.machine.state import State
from cosmos_core.controller.server import Server
from cosmos_core.run.plots import Series, plot
from cosmos_core.transport import sockets
from cosmos_core.transport.directives import Lease, PolicyDirective, RolloutDirective
from cosmos_core.transport.door import listen
from cosmos_core.transport.messages import WIRE_VERSION, Beat, Directive, Hello, Reports, Welcome
from cosmos_core.transport.reports import (
    GenerationFormed,
    GroupFinished,
    Report,
    SampleReport,
    StepDone,
    WeightsLoaded,
    WeightsPublished,
)
from cosmos_core.transport.wire import DOWN, REPORT, UP

BATCH = 8
"""Results of one message."""
RATE = 400.0
"""Messages with results that all replicas together send a second, if they can."""
HEARTBEAT_S = 1.0
CLIENTS = 4
POLICY = "policy-0"


def settings(num_replicas: int, group_size: int) -> Settings:
    """A run that never ends and in which nothing is ever too old."""
    stage = StageSettings(
        source="rollouts",
        first_version=0,
        steps=10**6,
        prompts_per_step=max(256, num_replicas * BATCH // 2),
        min_group_size=1,
    )
    return Settings(
        run_id="run",
        seed=5,
        num_rows=10**5,
        stages=(stage,),
        num_policies=1,
        num_rollouts=num_replicas,
        group_size=group_size,
        capacity=2 * BATCH,
        max_staleness=10**5,
        synchronous=False,
        sync_interval=1,
        evaluation_prompts=0,
        evaluation_interval=0,
        checkpoint_interval=0,
        rewards=("right",),
    )


def opened(journal: Journal, chosen: Settings) -> State:
    """The state of a run that has just been opened, in its first term."""
    opening, started = RunOpened(settings=chosen), ControllerStarted(term=1)
    state = core.begin(opening)
    core.step(state, started)
    journal.append(opening)
    journal.append(started)
    journal.commit()
    return state


class Replica:
    """A simulated replica's side of the protocol: no losses to repeat anything for."""

    def __init__(self, name: str, group_size: int) -> None:
        self.name = name
        self.leases: list[Lease] = []
        self.term = 0
        self._sequence = 0
        self._revision = 0
        self._step = 0
        self._newest_lease = 0
        self.samples = tuple(_sample(index) for index in range(group_size))

    def hello(self) -> bytes:
        """Ask to join."""
        return UP.encode(
            Hello(
                wire=WIRE_VERSION,
                run_id="run",
                name=self.name,
                role="policy" if self.name == POLICY else "rollout",
                incarnation=self.name,
                host="host",
                pid=1,
                step=0,
                endpoints={"weights": f"weights/{self.name}", "payloads": f"payloads/{self.name}", "store": "store"},
            )
        )

    def beat(self) -> bytes:
        """Still here."""
        beat = Beat(name=self.name, incarnation=self.name, term=self.term, revision=self._revision, gauges={})
        return UP.encode(beat)

    def reports(self, *reports: Report) -> bytes:
        """Something to tell."""
        first = self._sequence + 1
        self._sequence += len(reports)
        encoded = tuple(REPORT.encode(report) for report in reports)
        return UP.encode(Reports(name=self.name, incarnation=self.name, term=self.term, first=first, reports=encoded))

    def results(self) -> bytes:
        """Eight leases are finished."""
        done, self.leases = self.leases[:BATCH], self.leases[BATCH:]
        return self.reports(*(GroupFinished(lease=lease.lease, samples=self.samples) for lease in done))

    def hear(self, data: bytes) -> list[bytes]:
        """What the controller says; what there is to answer at once."""
        message = DOWN.decode(data)
        if isinstance(message, Welcome):
            self.term = message.term
        if not isinstance(message, Directive) or message.revision <= self._revision or not self.term:
            return []
        self._revision = message.revision
        if message.rollout is not None:
            return self._roll_out(message.rollout)
        return self._train(message.policy) if message.policy is not None else []

    def _roll_out(self, directive: RolloutDirective) -> list[bytes]:
        fresh = [lease for lease in directive.leases if lease.lease > self._newest_lease]
        self.leases += fresh
        self._newest_lease = max((lease.lease for lease in fresh), default=self._newest_lease)
        if directive.weights is None or self._step:
            return []
        self._step = 1
        return [self.reports(WeightsLoaded(version=0, digest="d", transfer_s=0, paused_s=0, nbytes=1))]

    def _train(self, directive: PolicyDirective) -> list[bytes]:
        order, generation = directive.train, directive.generation
        if generation is not None and not self._step:
            self._step = 1
            formed = GenerationFormed(generation=generation.generation, step=0)
            return [self.reports(formed, WeightsPublished(version=0, digest="d", nbytes=1))]
        if order is None or order.step < self._step:
            return []
        self._step = order.step + 1
        metrics = {"loss": 1.0}
        return [
            self.reports(StepDone(step=order.step, attempt=order.attempt, generation=1, skipped=False, metrics=metrics))
        ]


def _sample(index: int) -> SampleReport:
    return SampleReport(
        index=index,
        status="ok",
        reward=1.0,
        rewards={"right": 1.0},
        oldest_version=0,
        newest_version=0,
        num_units=100,
        num_prompt_units=50,
    )


@attrs.frozen
class Accounting:
    """How fast results are accounted for, on one core."""

    num_replicas: int
    group_size: int
    synchronous: str
    rollouts: int
    cpu_s: float
    commits: int


def account(num_replicas: int, group_size: int, *, durable: bool, seconds: float) -> Accounting:
    """Have results accounted for without sockets, for so many seconds of CPU."""
    control = ControlConfig(lost_after_s=1e9, join_timeout_s=1e9, progress_timeout_s=1e9)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal.sqlite", durable=durable) as journal,
    ):
        desk = Desk(opened(journal, settings(num_replicas, group_size)), journal, control, 0.0)
        names = [POLICY, *(f"rollout-{index}" for index in range(num_replicas))]
        replicas = {name.encode(): Replica(name, group_size) for name in names}
        waiting = [(identity, replica.hello()) for identity, replica in replicas.items()]
        cpu_s, now, rollouts, commits = 0.0, 0.0, 0, 0
        while cpu_s < seconds:
            now += 0.01
            began = time.process_time()
            for identity, data in waiting:
                desk.take(identity, UP.decode(data), now)
            desk.tick(now)
            said = [(identity, DOWN.encode(message)) for identity, message in desk.commit(now)]
            is_measured = rollouts > 0 or any(replica.leases for replica in replicas.values())
            cpu_s += time.process_time() - began if is_measured else 0.0
            commits += is_measured
            waiting = [(identity, data) for identity, heard in said for data in replicas[identity].hear(heard)]
            for identity, replica in replicas.items():
                if len(replica.leases) >= BATCH:
                    waiting.append((identity, replica.results()))
                    rollouts += BATCH * group_size
        rollouts = desk.state.ledger.samples.generated
    return Accounting(num_replicas, group_size, "FULL" if durable else "NORMAL", rollouts, cpu_s, commits)


@attrs.frozen
class Served:
    """What the server's process took."""

    cpu_s: float
    wall_s: float
    rollouts: int
    before_mb: float
    peak_mb: float


@attrs.define
class Said:
    """What replicas said while it was measured, and how long leases took, in seconds."""

    messages: int = 0
    results: int = 0
    lease_s: list[float] = attrs.field(factory=list)


def serve(num_replicas: int, folder: str, line: Connection) -> None:
    """The server's process: tell the address, measure between two words, tell what it took."""
    control = ControlConfig(heartbeat_s=HEARTBEAT_S, lost_after_s=600.0, join_timeout_s=600.0)
    with zmq.Context() as context, Journal(Path(folder) / "journal.sqlite") as journal:
        context.set(zmq.MAX_SOCKETS, 20_000)
        state = opened(journal, settings(num_replicas, 1))
        before_mb = _peak_mb()
        guarded = listen(context, "127.0.0.1", 0, sockets.CONTROL)
        server = Server(state, journal, guarded, control, Accounts(Path(folder) / "accounts", keep=1))
        began = start = done = 0.0
        try:
            line.send(sockets.address_of(guarded.socket))
            word = ""
            while word != "end":
                if word == "begin":
                    began, start, done = time.process_time(), time.monotonic(), state.ledger.samples.generated
                guarded.socket.poll(100)
                server.turn()
                word = line.recv() if line.poll() else ""
            line.send(
                Served(
                    cpu_s=time.process_time() - began,
                    wall_s=time.monotonic() - start,
                    rollouts=state.ledger.samples.generated - int(done),
                    before_mb=before_mb,
                    peak_mb=_peak_mb(),
                )
            )
        finally:
            guarded.close(linger_ms=0)


def replicate(address: str, names: list[str], period_s: float, line: Connection) -> None:
    """A process with some of the replicas: join, say so, work until told to stop, tell what was said."""
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
        now = time.monotonic()
        # Spread over time, as they would be.
        due = [
            (now + index * HEARTBEAT_S / len(self._replicas), name, "beat") for index, name in enumerate(self._replicas)
        ]
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
                    line.send(len(self._replicas))
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
        period_s = HEARTBEAT_S if what == "beat" else self._period_s
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
        address = served.recv()
        period_s = num_replicas / RATE
        crowds = [stack.enter_context(_process(context, replicate, address, share, period_s)) for share in shares]
        assert sum(crowd.recv() for crowd in crowds) == len(names)
        time.sleep(min(5.0, 2 * period_s))
        for line in (served, *crowds):
            line.send("begin")
        time.sleep(seconds)
        for line in (served, *crowds):
            line.send("end")
        said = [crowd.recv() for crowd in crowds]
        everything = Said(
            messages=sum(each.messages for each in said),
            results=sum(each.results for each in said),
            lease_s=[lease for each in said for lease in each.lease_s],
        )
        return Measured(num_replicas, served.recv(), everything)


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


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def accounting_table(rows: list[Accounting]) -> list[list[str]]:
    """One row for each way of accounting."""
    return [
        [
            f"{row.num_replicas:,}",
            str(row.group_size),
            row.synchronous,
            f"{row.rollouts / row.cpu_s:,.0f}",
            f"{row.cpu_s / row.rollouts * 1e6:.1f}",
            f"{row.rollouts / row.commits:,.0f}",
        ]
        for row in rows
    ]


def socket_table(rows: list[Measured]) -> list[list[str]]:
    """One row for each number of replicas."""
    return [
        [
            f"{row.num_replicas:,}",
            f"{row.said.messages / row.served.wall_s:,.0f}",
            f"{row.served.rollouts / row.served.wall_s:,.0f}",
            f"{row.served.cpu_s / row.served.wall_s * 100:.0f}",
            f"{row.served.cpu_s / max(1, row.said.messages) * 1e6:.0f}",
            f"{row.served.cpu_s / max(1, row.served.rollouts) * 1e6:.0f}",
            *(f"{value:.0f}" for value in row.lease_ms),
            f"{row.served.peak_mb - row.served.before_mb:.0f}",
        ]
        for row in rows
    ]


ACCOUNTING = ("replicas", "samples a prompt", "synchronous", "rollouts / CPU s", "µs a rollout", "rollouts a commit")
SOCKETS = (
    "replicas",
    "messages/s",
    "rollouts/s",
    "CPU %",
    "µs a message",
    "µs a rollout",
    "lease p50 ms",
    "lease p99 ms",
    "MB more",
)


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(out: Path, accounting: list[Accounting], measured: list[Measured]) -> None:
    """Tables into OUT.md, plots into OUT-*.svg."""
    cost = [
        Series(
            "a message",
            [(row.num_replicas, row.served.cpu_s / row.said.messages * 1e6) for row in measured],
            marked=True,
        )
    ]
    leases = [
        Series(label, [(row.num_replicas, row.lease_ms[index]) for row in measured], marked=True)
        for index, label in enumerate(("p50", "p99"))
    ]
    for name, series, label in (("cost", cost, "CPU of the controller, µs"), ("lease", leases, "a lease, ms")):
        drawn = plot(f"controller-{name}", series, x_label="replicas", y_label=label)
        out.with_name(f"{out.name}-{name}.svg").write_text(drawn, encoding="utf-8")
    sections = (
        "# The controller: `python benchmarks/controller.py --out " + str(out) + "`",
        *__doc__.split("\n\n")[2:],
        "## Accounting, eight results a message, on one core",
        markdown(ACCOUNTING, accounting_table(accounting)),
        "## Replicas at its socket",
        markdown(SOCKETS, socket_table(measured)),
        f"![CPU of a message]({out.name}-cost.svg)\n\n![Time of a lease]({out.name}-lease.svg)",
    )
    out.with_suffix(".md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print; write it down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 100, 1000, 5000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="where to write tables and plots, without an ending")
    options = parser.parse_args()
    accounting = [
        account(replicas, group_size, durable=durable, seconds=options.seconds / 4)
        for replicas, group_size, durable in (
            (100, 1, False),
            (100, 1, True),
            (100, 8, False),
            (100, 8, True),
            (1000, 1, False),
        )
    ]
    measured = [measure(replicas, options.seconds) for replicas in options.replicas]
    for title, columns, rows in (
        ("Accounting, eight results a message, on one core", ACCOUNTING, accounting_table(accounting)),
        ("Replicas at its socket", SOCKETS, socket_table(measured)),
    ):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        Console(width=140).print(table)
    if options.out is not None:
        write(options.out, accounting, measured)


if __name__ == "__main__":
    main()
