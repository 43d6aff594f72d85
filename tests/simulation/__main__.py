"""How many bugs the simulation finds, from seeds that nobody has chosen.

    python -m tests.simulation plants [--seeds 0:200] [--known] [--write]
    python -m tests.simulation mutants [--number 60] [--draw 1] [--seeds 0:100]

`plants` are written by hand (`plants/`), `mutants` made by rule (`mutants.py`), a random choice of them. Each bug is in
the program alone, and seeds are tried in order until an oracle tells of it. `--write` keeps the seeds of plants for
`test_plants.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

from .mutants import Mutant, drawn
from .plants import PLANTS
from .plants.planting import Plant, planted
from .searching import Finding, search

SEEDS = Path(__file__).with_name("seeds.json")


def main(argv: Sequence[str] | None = None) -> None:
    """Search and tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("plants", "mutants"))
    parser.add_argument("--seeds", default="0:200", help="to try, the last one not included")
    parser.add_argument("--number", type=int, default=60, help="of mutants")
    parser.add_argument("--draw", type=int, default=1, help="seed of the choice of mutants")
    parser.add_argument("--only", default="", help="bugs whose name has this in it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--known", action="store_true", help="try the seeds first that are kept")
    parser.add_argument("--missing", action="store_true", help="only plants of which no seed is kept")
    parser.add_argument("--write", action="store_true", help="keep the seeds of plants")
    options = parser.parse_args(argv)
    first, end = map(int, options.seeds.split(":"))
    every: Sequence[Plant | Mutant] = PLANTS if options.what == "plants" else drawn(options.number, options.draw)
    kept = json.loads(SEEDS.read_text(encoding="utf-8"))
    bugs = [bug for bug in every if options.only in bug.name and not (options.missing and bug.name in kept)]
    known = kept if options.known else {}
    began = time.monotonic()
    jobs = [(bug, [*([known[bug.name]] if bug.name in known else []), *range(first, end)]) for bug in bugs]
    found: dict[str, Finding] = {}
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for bug, finding in zip(bugs, pool.imap(_search, jobs), strict=True):
            told = "NOT FOUND" if finding is None else f"seed {finding.seed}, {finding.oracle}"
            print(f"{bug.name}: {told}", flush=True)
            if finding is not None:
                found[bug.name] = finding
                if options.write:
                    _keep(bug.name, finding.seed)
    tried = sorted(finding.seed - first + 1 for finding in found.values()) or [0]
    print(
        f"found {len(found)} of {len(bugs)} in at most {end - first} seeds each, half of those within "
        f"{tried[len(tried) // 2]}; {time.monotonic() - began:.0f} s"
    )


def _keep(name: str, seed: int) -> None:
    seeds = json.loads(SEEDS.read_text(encoding="utf-8")) | {name: seed}
    SEEDS.write_text(json.dumps(seeds, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _search(job: tuple[Plant | Mutant, list[int]]) -> Finding | None:
    bug, seeds = job
    return search(planted(bug) if isinstance(bug, Plant) else bug.planted(), seeds)


if __name__ == "__main__":
    main()
