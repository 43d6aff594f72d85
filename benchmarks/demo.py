"""The demo, asynchronous and synchronous: `python benchmarks/demo.py [--seeds N] [--modes async,sync] [--set k=v ...]`.

Wall time is that of the whole command, start-up and report included. Both modes train the same number of steps of the
same recipe; their ratio is of the main stage alone, because the warm-up is the same in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
MODES = {"async": ["sync.mode=async"], "sync": ["sync.mode=sync"]}


@attrs.frozen(kw_only=True)
class Outcome:
    """One run: its mode and seed, seconds of the whole command, and its summary."""

    mode: str
    seed: int
    wall_s: float
    summary: dict[str, Any]

    @property
    def main_s(self) -> float:
        """Seconds of the main stage."""
        return float(self.summary["stages"][-1]["seconds"])


def run(folder: Path, mode: str, seed: int, settings: list[str]) -> Outcome:
    """Run the demo once."""
    name = f"{mode}-{seed}"
    chosen = [*MODES[mode], f"run.seed={seed}", f"run.output_dir={json.dumps(str(folder))}", *settings]
    overrides = [argument for setting in chosen for argument in ("--set", setting)]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "cosmos_core.cli", "run", str(RECIPE), "--name", name, *overrides],
        check=False,
        capture_output=True,
        text=True,
    )
    wall_s = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
    summary = json.loads((folder / name / "summary.json").read_text())
    return Outcome(mode=mode, seed=seed, wall_s=wall_s, summary=summary)


def main() -> None:
    """Run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument("--modes", default="async,sync", help="which modes, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", dest="settings", help="as of cosmos run")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="cosmos-demo-") as folder:
        for seed in range(options.seeds):
            for mode in options.modes.split(","):
                outcomes.append(run(Path(folder), mode, seed, options.settings))
                last = outcomes[-1]
                after = last.summary["heldout_accuracy_after"]
                print(f"{mode}, seed {seed}: {after:.3f} after {last.wall_s:.0f} s", file=sys.stderr)
    show(outcomes)


def show(outcomes: list[Outcome]) -> None:
    """Print a row for each run, and the ratio of the modes."""
    table = Table(title="The demo")
    for column in (
        "mode",
        "seed",
        "before",
        "after",
        "wall s",
        "main stage s",
        "policy tok/s",
        "rollout tok/s",
        "stale",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for each in outcomes:
        rates, staleness = each.summary["tokens_per_s"], each.summary["staleness"]
        table.add_row(
            each.mode,
            str(each.seed),
            f"{each.summary['heldout_accuracy_before']:.3f}",
            f"{each.summary['heldout_accuracy_after']:.3f}",
            f"{each.wall_s:.1f}",
            f"{each.main_s:.1f}",
            f"{rates['policy'] or 0:,.0f}",
            f"{rates['rollout'] or 0:,.0f}",
            f"{staleness['mean']:.2f}",
        )
    Console().print(table)
    seconds = {mode: [each.main_s for each in outcomes if each.mode == mode] for mode in MODES}
    if all(seconds.values()):
        ratio = statistics.mean(seconds["sync"]) / statistics.mean(seconds["async"])
        print(f"Main stage: asynchronous mode is {ratio:.2f} times as fast as synchronous mode.")


if __name__ == "__main__":
    main()
