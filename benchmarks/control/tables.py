"""Tables and plots of what was measured."""

from __future__ import annotations

from pathlib import Path

from control.accounting import Accounting
from control.process import Measured


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
            f"{row.served.join_s:.1f}",
            f"{row.served.start_cpu_s / (row.num_replicas + 1) * 1e3:.2f}",
            f"{row.said.messages / row.served.wall_s:,.0f}",
            f"{row.served.rollouts / row.served.wall_s:,.0f}",
            f"{row.served.cpu_s / row.served.wall_s * 100:.0f}",
            f"{message_us(row):.0f}",
            f"{row.served.cpu_s / max(1, row.served.rollouts) * 1e6:.0f}",
            *(f"{value:.0f}" for value in row.lease_ms),
            f"{row.served.replicas_mb / (row.num_replicas + 1) * 1024:.0f}",
            f"{row.served.growth_mb / max(1, row.served.rollouts) * 2**20:.0f}",
        ]
        for row in rows
    ]


def message_us(row: Measured) -> float:
    """CPU of the controller for a message, in microseconds."""
    return row.served.cpu_s / max(1, row.said.messages) * 1e6


ACCOUNTING = ("replicas", "samples a prompt", "synchronous", "rollouts / CPU s", "µs a rollout", "rollouts a commit")
SOCKETS = (
    "replicas",
    "joined s",
    "start CPU ms each",
    "messages/s",
    "rollouts/s",
    "CPU %",
    "µs a message",
    "µs a rollout",
    "lease p50 ms",
    "lease p99 ms",
    "KB a replica",
    "growth B a rollout",
)


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(out: Path, about: str, accounting: list[Accounting], measured: list[Measured]) -> None:
    """Tables into OUT.md, plots into OUT-*.svg; `about` says how it was measured."""
    from control.plots import plot  # matplotlib is of the environment of developers

    plots = {
        "cost": ("CPU of the controller for a message, µs", [("a message", message_us)]),
        "start": ("CPU to join and begin, ms a replica", [("a replica", _start_ms)]),
        "lease": ("a lease, ms", [("p50", lambda row: row.lease_ms[0]), ("p99", lambda row: row.lease_ms[1])]),
        "memory": ("memory of all replicas, MB", [("all", lambda row: row.served.replicas_mb)]),
    }
    for name, (label, lines) in plots.items():
        points = {each: [(row.num_replicas, value(row)) for row in measured] for each, value in lines}
        plot(out.with_name(f"{out.name}-{name}.svg"), points, x_label="replicas", y_label=label)
    sections = (
        f"# The controller: `python benchmarks/controller.py --out {out}`",
        about,
        "## Accounting, eight results a message, on one core",
        markdown(ACCOUNTING, accounting_table(accounting)),
        "## Replicas at its socket",
        markdown(SOCKETS, socket_table(measured)),
        "\n\n".join(f"![{label}]({out.name}-{name}.svg)" for name, (label, _) in plots.items()),
    )
    out.with_suffix(".md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _start_ms(row: Measured) -> float:
    return row.served.start_cpu_s / (row.num_replicas + 1) * 1e3
