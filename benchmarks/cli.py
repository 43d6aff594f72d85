"""How long the command line takes to start: `python benchmarks/cli.py [--rounds N]`.

Each command is a fresh process; the bound for `cosmos --help` is 0.2 s, without torch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

COMMANDS = (["--help"], ["run", "--help"], ["version"], ["plugins", "list"])
HEAVY = ("torch", "transformers", "mlflow", "matplotlib", "rich", "zmq")
BOUND_S = 0.2


def seconds(command: list[str], rounds: int) -> list[float]:
    """Wall time of each round, one warm-up before them."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return taken[1:]


def imported(arguments: list[str]) -> str:
    """Which of the heavy modules a command imports."""
    code = (
        "import sys\nfrom cosmos_core.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), sep=', ', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stderr.strip() or "none"


def main() -> int:
    """Measure, print, and fail if `cosmos --help` is too slow or imports torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    table = Table(title=f"Start-up of the command line ({rounds} processes each)")
    for column in ("command", "median s", "fastest s", "slowest s", "heavy modules imported"):
        table.add_column(column, justify="right" if column.endswith(" s") else "left")
    bare = seconds([sys.executable, "-c", "pass"], rounds)
    table.add_row("python -c pass", *(f"{value:.3f}" for value in (statistics.median(bare), min(bare), max(bare))), "")
    is_good = True
    for arguments in COMMANDS:
        taken = seconds([sys.executable, "-m", "cosmos_core.cli", *arguments], rounds)
        heavy = imported(arguments)
        table.add_row(
            f"cosmos {' '.join(arguments)}",
            *(f"{value:.3f}" for value in (statistics.median(taken), min(taken), max(taken))),
            heavy,
        )
        if arguments == ["--help"]:
            is_good = statistics.median(taken) < BOUND_S and "torch" not in heavy
    Console().print(table)
    print(f"cosmos --help: {'within' if is_good else 'OVER'} {BOUND_S} s without torch")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
