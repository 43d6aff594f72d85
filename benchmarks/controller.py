"""What one controller can do: rollouts accounted for durably, and thousands of simulated replicas at its socket.

    python benchmarks/controller.py [--replicas 1 100 1000] [--seconds 10] [--out benchmarks/results/controller-cpu]

Accounting: the real server loop and the real journal on one core, eight results a message, without sockets. CPU is that
of decoding, the state machine, the commit, and encoding what is said; that of the replicas is not counted.
Sockets: the real server in a process of its own and replicas in others, each with its own connection, heartbeats and
leases. They take no time to generate: each reports a message of eight results when its turn comes, so that all of them
together say as much a second whatever their number, as far as the machine can, and beat once a second. A lease takes
from sending such a message to the directive with the next leases. CPU is the server's, of its process; so is the
memory. Before that all of them join at once, in a tree of those that pass weights on, load the first weights and get
their first leases. Every rollout is a prompt of its own (groups of one sample) unless a row says otherwise: that is the
dearest case.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from control.accounting import throughput
from control.process import measure
from control.tables import ACCOUNTING, SOCKETS, accounting_table, socket_table, write
from rich.console import Console
from rich.table import Table

WAYS = ((100, 1, False), (100, 1, True), (100, 8, False), (100, 8, True), (1000, 1, False), (5000, 1, False))
"""Of accounting: replicas, samples a prompt, whether each commit is synchronous."""


def main() -> None:
    """Measure and print; write it down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 100, 1000, 5000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="where to write tables and plots, without an ending")
    options = parser.parse_args()
    load = os.getloadavg()[1]
    accounting = [
        throughput(replicas, group_size, durable=durable, seconds=options.seconds / 4)
        for replicas, group_size, durable in WAYS
    ]
    measured = [measure(replicas, options.seconds) for replicas in options.replicas]
    console = Console(width=160)
    for title, columns, rows in (
        ("Accounting, eight results a message, on one core", ACCOUNTING, accounting_table(accounting)),
        ("Replicas at its socket", SOCKETS, socket_table(measured)),
    ):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    machine = f"Measured with {os.cpu_count()} CPU cores; before it, {load:.1f} processes wanted them on average."
    if options.out is not None:
        about = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
        write(options.out, f"{about}\n\n{machine}", accounting, measured)


if __name__ == "__main__":
    main()
