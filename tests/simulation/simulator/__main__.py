"""`python -m tests.simulation.simulator`: simulate runs by their seeds; a violation is told with its last events.

Exit codes: 0 when every oracle held in every seed; 1 at a violation; 2 when what is asked makes no sense.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from cosmos_core.errors import ConfigError
from tests.simulation.simulator import Faults, Simulation, Violation

_SHORT = 60
_WHOLE = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: --seeds 0:500, then --seed N --trace of the one that failed",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="the one run to simulate")
    which.add_argument("--seeds", metavar="FIRST:END", help="the runs of all these seeds, the last one not included")
    parser.add_argument("--faults", metavar="NAME=NUMBER,…", help="what goes wrong; of the seed if it is not given")
    parser.add_argument("--trace", action="store_true", help="tell all that happened, also when every oracle held")
    options = parser.parse_args(argv)
    try:
        seeds = _seeds(options.seeds) if options.seeds else range(options.seed, options.seed + 1)
        faults = None if options.faults is None else Faults.parse(options.faults)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # The server loop warns of whom it loses; here that is the point, and the trace tells it.
    log = logging.getLogger("cosmos_core")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return _simulate(seeds, faults, is_told=options.trace)
    finally:
        log.setLevel(level)


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise ConfigError(f"--seeds is {text!r}; it must be two numbers, the smaller first, as in 0:500")
    return range(int(first), int(end))


def _simulate(seeds: range, faults: Faults | None, *, is_told: bool) -> int:
    began, num_events, outcomes = time.process_time(), 0, dict[str, int]()
    for seed in seeds:
        simulation = Simulation(seed, faults=faults, kept=_WHOLE if is_told else _SHORT)
        try:
            state = simulation.run()
        except Violation as violation:
            print(violation, file=sys.stderr)
            return 1
        num_events += simulation.witness.num_events
        outcomes[state.outcome] = outcomes.get(state.outcome, 0) + 1
        if is_told:
            print("\n".join(simulation.trace.lines()))
    seconds = time.process_time() - began
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    print(f"{len(seeds)} runs: {told}; {num_events:,} events in {seconds:.1f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
