"""Qualifies a machine with a GPU: what runs, what is right, how fast, against bounds; see docs/gpu.md.

python -m tests.gpu.qualify [--stages A,B] [--minutes 10] [--device cpu --tiny] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.gpu.qualify import machine
from tests.gpu.qualify.checks import CHECKS, ROOT, STAGES, Check
from tests.gpu.qualify.report import Figure, Report
from tests.gpu.qualify.stage import Budget, run_stage, work

RESULTS: Final = ROOT / "benchmarks" / "results"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.qualify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stages = ", ".join(f"{letter} {title}" for letter, title in STAGES.items())
    parser.add_argument("--stages", default=",".join(STAGES), help=f"separated by commas or spaces: {stages}")
    parser.add_argument("--only", nargs="+", default=[""], help="checks whose names contain one of these")
    parser.add_argument("--minutes", type=_minutes, help="for all of it: what does not fit is skipped, the least first")
    parser.add_argument("--stage-minutes", type=_minutes, help="for each stage (default: 8, or 30 with --tiny)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; what is fast is measured and not judged")
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT"), help="folder for the results (default: $OUT)"
    )
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    asked, options.stages = options.stages, re.findall(r"[^\s,]+", options.stages.upper())
    if unknown := [stage for stage in options.stages if stage not in STAGES]:
        parser.error(f"--stages: there is no {', '.join(unknown)}; there are {stages}")
    if not options.stages:
        parser.error(f"--stages: {asked!r} names none; there are {stages}")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: real shapes take hours there; add --tiny")
    return options


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (minutes := float(text)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"expected minutes, a number above 0, got {text!r}; leave it out for no limit")


def place(options: argparse.Namespace, device: str) -> tuple[Path, str]:
    """The folder and the name of the results."""
    name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    if options.out:
        return Path(options.out), name
    # What a dry run finds is no result.
    return (Path(tempfile.mkdtemp(prefix="cosmos-gpu-")) if options.tiny else RESULTS), name


def main(arguments: Sequence[str]) -> int:
    """Run the stages; the exit status: 1 if something failed or nothing ran, 2 if there is nothing to run on."""
    options = parsed(arguments)
    if options.work:
        return work(options.work)
    facts = machine.facts(options.device)
    if isinstance(facts, str):
        print(facts, file=sys.stderr)
        return 2
    folder, name = place(options, facts["device"])
    report = Report(folder=folder, name=name, machine=facts, titles=STAGES)
    print("\n".join(f"{key}: {value}" for key, value in facts.items() if value), flush=True)
    chosen = {
        stage: [each for each in CHECKS[stage] if any(part in each.name for part in options.only)]
        for stage in options.stages
    }
    budget = Budget.of(
        chosen,
        minutes=options.minutes,
        stage_s=60 * (options.stage_minutes or (30 if options.tiny else 8)),
        is_tiny=options.tiny,
    )
    log = (ROOT / "runs" / "gpu" if folder == RESULTS else folder) / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # Whoever stops this leaves none of the processes that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(chosen, options, report, budget, log)
    except KeyboardInterrupt:
        print("stopped, and its processes with it", file=sys.stderr)
        return 130
    finally:
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:.1f} minutes; {folder / name}.md and .json; the log: {log}")
    if not report.has_run:
        print("nothing has run: every check was skipped, or none was chosen", file=sys.stderr)
    return int(report.has_failed or not report.has_run)


def _run(
    chosen: Mapping[str, Sequence[Check]], options: argparse.Namespace, report: Report, budget: Budget, log: Path
) -> None:
    """Run what was chosen, a stage after the other."""
    for stage, checks in chosen.items():
        print(f"{stage} {STAGES[stage]}", flush=True)
        for check in checks:
            if reason := budget.left_out.get((stage, check.name)):
                report.add(stage, Figure(name=check.name, verdict="skipped", note=reason))
        fitting = [check for check in checks if (stage, check.name) not in budget.left_out]
        run_stage(stage, fitting, device=options.device, is_tiny=options.tiny, report=report, budget=budget, log=log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
