"""How long the command line takes to start: `python benchmarks/cli.py [--rounds N]`.

Each command is a fresh process. Bounds, both without torch: `cosmos --help` 0.15 s; `cosmos plugins list` with 30 more
distributions installed 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

COMMANDS = (["--help"], ["run", "--help"], ["version"], ["plugins", "list"])
HEAVY = ("torch", "transformers", "mlflow", "matplotlib", "rich", "zmq")
BOUNDS_S = {"cosmos --help": 0.15, "cosmos plugins list (30 more)": 0.5}
NUM_MORE = 30


def make_distributions(folder: Path) -> None:
    """Metadata and a module of throw-away plugins, of every kind, as a wheel leaves them."""
    for index in range(NUM_MORE):
        kind = ("reward", "dataset", "algorithm", "model", "engine", "hook")[index % 6]
        info = folder / f"bench_{index}-1.0.dist-info"
        info.mkdir()
        (folder / f"bench_{index}.py").write_text("raise RuntimeError('a listing imports no plugin')\n")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: bench-{index}\nVersion: 1.0\nRequires-Python: >=3.11\n"
            "Requires-Dist: attrs>=24.2\nRequires-Dist: cosmos-core>=0.1,<0.2\nRequires-Dist: numpy>=1.26\n\n"
            + "A description of some length.\n"
            * 100
        )
        (info / "entry_points.txt").write_text(f"[cosmos_core.{kind}s]\nbench-{index} = bench_{index}\n")


def seconds(command: list[str], rounds: int, path: str = "") -> list[float]:
    """Wall time of each round, one warm-up before them; `path` is put on the path of imports."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
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
    """Measure, print, and fail if a command that has a bound is too slow or imports torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    table = Table(title=f"Start-up of the command line ({rounds} processes each)")
    for column in ("command", "median s", "fastest s", "slowest s", "heavy modules imported"):
        table.add_column(column, justify="right" if column.endswith(" s") else "left")
    medians, heavy = {}, {}

    def measure(name: str, command: list[str], path: str = "") -> None:
        taken = seconds(command, rounds, path)
        medians[name] = statistics.median(taken)
        table.add_row(name, *(f"{value:.3f}" for value in (medians[name], min(taken), max(taken))), heavy.get(name, ""))

    measure("python -c pass", [sys.executable, "-c", "pass"])
    for arguments in COMMANDS:
        name = f"cosmos {' '.join(arguments)}"
        heavy[name] = imported(arguments)
        measure(name, [sys.executable, "-m", "cosmos_core.cli", *arguments])
    with tempfile.TemporaryDirectory() as folder:
        make_distributions(Path(folder))
        heavy["cosmos plugins list (30 more)"] = heavy["cosmos plugins list"]
        measure("cosmos plugins list (30 more)", [sys.executable, "-m", "cosmos_core.cli", "plugins", "list"], folder)
    Console().print(table)
    is_good = True
    for name, bound_s in BOUNDS_S.items():
        is_within = medians[name] < bound_s and "torch" not in heavy[name]
        is_good = is_good and is_within
        print(f"{name}: {'within' if is_within else 'OVER'} {bound_s} s without torch")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
