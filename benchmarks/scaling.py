"""How far one controller goes: a simulation of 10 to 10,000 rollout replicas, with service times that are measured.

    python benchmarks/scaling.py [--replicas 10 100 1000] [--seconds 5 20 60] [--out benchmarks/results/scaling-cpu]

Nothing here is a run: replicas and network are simulated. What is real is what the controller spends: its server loop
and its journal are timed first, on this machine, by CPU, and so is its socket. The simulated controller then does
what the real one does: in a turn it takes what has arrived, at most 2,000 messages, makes it durable together, and
answers. A replica decodes 8 groups of 8 samples at once, has 4 more leased to go on with, reports each group when it
is finished (after a time drawn around the given seconds), and beats once a second. A turn costs a part of its own,
and a part for each report and each beat. What comes out: groups accounted for a second, the share of time for which
the controller is busy, how long from the end of a group to the next lease, and for which share of the time a place in
an engine is empty because its lease has not come.
"""

from __future__ import annotations

import argparse
import heapq
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import mean

import attrs
import zmq
from control.opening import opened, settings
from control.replica import POLICY, Replica
from control.tables import markdown
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.journal import Journal
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.transport import sockets
from cosmos_core.transport.messages import DOWN, UP
from cosmos_core.transport.reports import GroupFinished

GROUP = 8
PLACES = 8
"""Groups that a replica decodes at once."""
SPARE = 4
"""Groups that it has leased besides."""
BEAT_S = 1.0
NETWORK_S = 0.0005
MOST_MESSAGES = 2000
LOST_AFTER_S = 15.0
REPLICAS = 100
"""Of the server loop that is timed."""


@attrs.frozen(kw_only=True)
class Costs:
    """CPU seconds that the controller spends."""

    turn_s: float
    report_s: float
    beat_s: float
    socket_s: float
    """To take a message from the socket and put one into it."""

    def turn(self, reports: int, beats: int) -> float:
        """A turn with so many messages."""
        taken = reports * (self.report_s + self.socket_s) + beats * (self.beat_s + self.socket_s / 2)
        return self.turn_s + taken


@attrs.frozen(kw_only=True)
class Outcome:
    """What a simulation came to."""

    num_replicas: int
    group_s: float
    offered: float
    accounted: float
    busy: float
    lease_s: tuple[float, float, float]
    """From the end of a group to the next lease: half of them, all but one in a hundred, the longest."""
    idle: float


def costs() -> Costs:
    """Time the real server loop, journal and socket, on this machine."""
    control = ControlConfig(lost_after_s=1e9, join_timeout_s=1e9, progress_timeout_s=1e9)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.sqlite") as journal:
        server_loop = ServerLoop(opened(journal, settings(REPLICAS, GROUP)), journal, control, 0.0)
        replicas = {name.encode(): Replica(name, GROUP) for name in [POLICY, *(f"r-{i}" for i in range(REPLICAS))]}
        clock = 0.0

        def turn(messages: list[tuple[bytes, bytes]]) -> float:
            nonlocal clock
            clock += 0.01
            began = time.process_time()
            for identity, data in messages:
                server_loop.take(identity, UP.decode(data), clock)
            server_loop.failure_detector.look(clock, lambda *_: True)
            said = [(identity, DOWN.encode(message)) for identity, message in server_loop.commit(clock)]
            took = time.process_time() - began
            answers = [(identity, data) for identity, heard in said for data in replicas[identity].hear(heard)]
            if answers:
                turn(answers)
            return took

        turn([(identity, replica.hello()) for identity, replica in replicas.items()])
        working = [(identity, replica) for identity, replica in replicas.items() if replica.name != POLICY]

        def report(number: int) -> float:
            messages = []
            for identity, replica in working[:number]:
                lease = replica.leases.pop(0)
                messages.append((identity, replica.reports(GroupFinished(lease=lease.lease, samples=replica.samples))))
            working.append(working.pop(0))
            return turn(messages)

        few = mean(report(1) for _ in range(300))
        many = mean(report(REPLICAS) for _ in range(60))
        beats = mean(turn([(identity, replica.beat()) for identity, replica in working]) for _ in range(60))
        empty = mean(turn([]) for _ in range(300))
    report_s = (many - few) / (REPLICAS - 1)
    return Costs(
        turn_s=max(empty, few - report_s),
        report_s=report_s,
        beat_s=max(0.0, beats - empty) / REPLICAS,
        socket_s=_socket_s(),
    )


def _socket_s(number: int = 3000) -> float:
    """CPU of a ROUTER that takes a message and answers it, its input and output thread included, as far as here."""
    with zmq.Context() as context:
        router = sockets.router(context, "127.0.0.1", 0)
        dealer = sockets.dealer(context, sockets.address_of(router), b"replica", queued=True)
        message = b"x" * 1000
        try:
            spent = 0.0
            for _ in range(number):
                sockets.offer(dealer, [message])
                router.poll()
                began = time.process_time()
                identity, _ = sockets.receive(router, 2)
                sockets.offer(router, [identity, message])
                spent += time.process_time() - began
                dealer.poll()
                sockets.receive(dealer, 1)
        finally:
            router.close(linger=0)
            dealer.close(linger=0)
    return spent / number


class Simulation:
    """Replicas and a controller; time is simulated, in seconds."""

    def __init__(self, num_replicas: int, group_s: float, spent: Costs, seed: int = 7) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._group_s = group_s
        self._num_replicas = num_replicas
        self._spent = spent
        self._waiting = [SPARE] * num_replicas
        self._empty: list[deque[float]] = [deque() for _ in range(num_replicas)]
        """Since when places are empty."""
        self._idle_s = 0.0
        self._counted_from = 0.0
        self._arrived: deque[tuple[float, str, int]] = deque()
        self._events: list[tuple[float, str, int]] = []
        for replica in range(num_replicas):
            # Spread over time, as they are in a run that has gone on for a while.
            for _ in range(PLACES):
                self._events.append((self._random.random() * group_s, "report", replica))
            self._events.append((self._random.random() * BEAT_S, "beat", replica))
        heapq.heapify(self._events)

    def run(self, lasts_s: float) -> Outcome:
        """Simulate so many seconds, of which the first third only settles."""
        now, self._counted_from = 0.0, lasts_s / 3
        busy = 0.0
        accounted = 0
        leases: list[float] = []
        while now < lasts_s:
            if not self._arrived:
                now = max(now, self._events[0][0] + NETWORK_S)
            self._advance(now - NETWORK_S)
            taken = [self._arrived.popleft() for _ in range(min(MOST_MESSAGES, len(self._arrived)))]
            reports = [(ended, replica) for ended, kind, replica in taken if kind == "report"]
            took = self._spent.turn(len(reports), len(taken) - len(reports))
            now += took
            for _, replica in reports:
                heapq.heappush(self._events, (now + NETWORK_S, "lease", replica))
            if now >= self._counted_from:
                busy += took
                accounted += len(reports)
                leases += [now + NETWORK_S - ended for ended, _ in reports]
        counted_s = now - self._counted_from
        empty = sum(now - max(began, self._counted_from) for places in self._empty for began in places if began < now)
        ordered = sorted(leases) or [0.0]
        return Outcome(
            num_replicas=self._num_replicas,
            group_s=self._group_s,
            offered=self._num_replicas * PLACES / self._group_s,
            accounted=accounted / counted_s,
            busy=min(1.0, busy / counted_s),
            lease_s=(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]),
            idle=(self._idle_s + empty) / (self._num_replicas * PLACES * counted_s),
        )

    def _advance(self, until: float) -> None:
        """Let replicas live up to a time; what they say waits for the controller."""
        while self._events and self._events[0][0] <= until:
            at, kind, replica = event = heapq.heappop(self._events)
            if kind == "lease":
                self._refill(replica, at)
                continue
            self._arrived.append(event)
            if kind == "beat":
                heapq.heappush(self._events, (at + BEAT_S, "beat", replica))
            elif self._waiting[replica]:
                self._waiting[replica] -= 1
                self._begin(replica, at)
            else:
                self._empty[replica].append(at)

    def _refill(self, replica: int, at: float) -> None:
        """A lease has reached a replica."""
        if not self._empty[replica]:
            self._waiting[replica] += 1
            return
        began = self._empty[replica].popleft()
        self._idle_s += max(0.0, at - max(began, self._counted_from))
        self._begin(replica, at)

    def _begin(self, replica: int, at: float) -> None:
        heapq.heappush(self._events, (at + self._group_s * self._random.lognormvariate(-0.125, 0.5), "report", replica))


COLUMNS = (
    "s a group",
    "replicas",
    "groups/s offered",
    "accounted for",
    "samples/s",
    "controller busy %",
    "next lease p50 ms",
    "p99 ms",
    "longest ms",
    "places empty %",
)


def rows(outcomes: list[Outcome]) -> list[list[str]]:
    """One for each simulation."""
    return [
        [
            f"{each.group_s:g}",
            f"{each.num_replicas:,}",
            f"{each.offered:,.0f}",
            f"{each.accounted:,.0f}",
            f"{each.accounted * GROUP:,.0f}",
            f"{each.busy * 100:.0f}",
            *(f"{value * 1e3:,.1f}" for value in each.lease_s),
            f"{each.idle * 100:.1f}",
        ]
        for each in outcomes
    ]


def write(out: Path, spent: Costs, outcomes: list[Outcome]) -> None:
    """A table into OUT.md, plots into OUT-*.svg."""
    from control.plots import plot  # matplotlib is of the environment of developers

    lengths = sorted({each.group_s for each in outcomes})
    for name, label, value in (
        ("throughput", "groups accounted for a second", lambda each: each.accounted),
        ("busy", "controller busy, %", lambda each: each.busy * 100),
        ("empty", "places empty, %", lambda each: each.idle * 100),
    ):
        lines = {
            f"{length:g} s a group": [(each.num_replicas, value(each)) for each in outcomes if each.group_s == length]
            for length in lengths
        }
        plot(out.with_name(f"{out.name}-{name}.svg"), lines, x_label="replicas (simulated)", y_label=label)
    sections = (
        f"# One controller and many replicas, simulated: `python benchmarks/scaling.py --out {out}`",
        __doc__.partition("\n\n")[2].partition("\n\n")[2].strip(),
        f"Measured here: {_words(spent)}.",
        markdown(COLUMNS, rows(outcomes)),
        _verdict(outcomes),
        "\n\n".join(f"![{name}]({out.name}-{name}.svg)" for name in ("throughput", "busy", "empty")),
    )
    out.with_suffix(".md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _words(spent: Costs) -> str:
    parts = {
        "a turn": spent.turn_s,
        "a report of a finished group and its next lease": spent.report_s,
        "a heartbeat": spent.beat_s,
        "a message in and out of the socket": spent.socket_s,
    }
    return ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in parts.items())


def _verdict(outcomes: list[Outcome]) -> str:
    """Where it saturates, and what becomes of the replicas then."""
    full = [each for each in outcomes if each.busy > 0.99]
    if not full:
        most = max(outcomes, key=lambda each: each.busy)
        share = f"{most.busy * 100:.0f} %"
        return f"It saturates nowhere here; with {most.num_replicas:,} replicas it is busy for {share} of the time."
    longest = max(each.lease_s[2] for each in full)
    kept = "below" if longest < LOST_AFTER_S else "above"
    return (
        f"Saturated, it accounts for {max(each.accounted for each in full):,.0f} groups a second, whatever is offered. "
        f"Nothing is lost: reports wait in the sockets, replicas go on with the {SPARE} groups that they have leased "
        "besides, and then leave places empty; what they may have in flight bounds what can wait. No answer took "
        f"longer than {longest:.1f} s, {kept} the {LOST_AFTER_S:g} s of `control.lost_after_s`, and it excuses "
        "silence while it was behind itself."
    )


def main() -> None:
    """Measure, simulate and print; write it down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000, 3000, 10_000])
    parser.add_argument("--seconds", type=float, nargs="+", default=[5.0, 20.0, 60.0], help="that a group takes")
    parser.add_argument("--out", type=Path, help="where to write table and plots, without an ending")
    options = parser.parse_args()
    spent = costs()
    console = Console(width=160)
    console.print(f"Measured here: {_words(spent)}.")
    outcomes = []
    with Progress(console=console) as bar:
        task = bar.add_task("simulating", total=len(options.replicas) * len(options.seconds))
        for group_s in options.seconds:
            for number in options.replicas:
                outcomes.append(Simulation(number, group_s, spent).run(max(15.0, 3 * group_s)))
                bar.advance(task)
    table = Table(*COLUMNS, title="Simulated")
    for row in rows(outcomes):
        table.add_row(*row)
    console.print(table)
    console.print(_verdict(outcomes))
    if options.out is not None:
        write(options.out, spent, outcomes)


if __name__ == "__main__":
    main()
