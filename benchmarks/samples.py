"""The cost of keeping samples: whole runs of the demo with `samples.keep` off and on, in pairs.

    python benchmarks/samples.py [--rounds 3] [--set run.steps=100]

Each pair runs in the other order than the one before. Rows have the seconds of the whole command and CPU seconds of all
processes; of the run that keeps them, the samples that can be read, those that the journal counts, and files and bytes.
Times vary more than what is measured here where other work shares the machine; CPU seconds tell more then.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

from running.whole import Whole, adopt_orphans, run_whole

from cosmos_core.storage.samples import samples
from cosmos_service_tools.printed_samples import accounted

RECIPE: Final = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
KEPT: Final = ("none", "10GB")


def main() -> None:
    """Run the pairs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="of the recipe, in both runs")
    given = parser.parse_args()
    adopt_orphans()
    found: list[dict[str, Whole]] = []
    print("| round | off s | on s | off CPU s | on CPU s | readable | journal | files | MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            pair = {}
            for keep in KEPT if number % 2 else KEPT[::-1]:
                changes = [part for each in (f"samples.keep={keep}", *given.overrides) for part in ("--set", each)]
                pair[keep] = run_whole(Path(folder), f"{keep}-{number}", str(RECIPE), *changes)
            found.append(pair)
            print(row(number, pair, Path(folder) / f"{KEPT[1]}-{number}"), flush=True)
    off, on = KEPT
    for name in ("seconds", "cpu_s"):
        ratios = [getattr(pair[on], name) / getattr(pair[off], name) for pair in found]
        print(f"\n{name}, on / off: median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def row(number: int, pair: dict[str, Whole], run: Path) -> str:
    """A row of the table, of a pair and the folder of its run that kept samples."""
    off, on = (pair[keep] for keep in KEPT)
    readable = sum(1 for _ in samples(run))
    counted = re.search(r"journal counts ([0-9,]+)", accounted(run))
    files = [path.stat().st_size for path in (run / "samples").iterdir()]
    return (
        f"| {number} | {off.seconds:.1f} | {on.seconds:.1f} | {off.cpu_s:.1f} | {on.cpu_s:.1f} | {readable:,} | "
        f"{counted[1] if counted else '?'} | {len(files)} | {sum(files) / 1e6:.1f} |"
    )


if __name__ == "__main__":
    main()
