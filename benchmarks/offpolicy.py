"""Learning from stale samples: `python benchmarks/offpolicy.py [--seeds N] [--variants A,B] [--set k=v ...]`.

The demo's recipe at a forced staleness: weights reach the rollout replicas every `--staleness` steps (`sync.interval`),
and samples may be as old when they are trained on (`sync.max_staleness`). The last row is in lockstep, for comparison.
Each run is a whole one, warm-up included; `main s` is of the steps of the algorithm alone, and `CPU s` of all processes
from start to end, which another load on the machine changes least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from running.whole import Whole, adopt_orphans, run_whole

RECIPE: Final = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
UNCORRECTED: Final = ("algorithm.options.weight_floor=1.0", "algorithm.options.weight_cap=1.0")
"""Every weight is 1: the policy gradient as if samples were of the weights that are trained."""
VARIANTS: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "no correction": ("aipo", UNCORRECTED),
    "AIPO": ("aipo", ()),
    "TIS": ("tis", ()),
    "IcePop": ("icepop", ()),
    "decoupled PPO": ("decoupled-ppo", ()),
    "sequence masking": ("sequence-masking", ()),
    "clip alone (GRPO)": ("grpo", ("algorithm.options.aggregation=token-mean",)),
}


@attrs.frozen(kw_only=True)
class Outcome:
    """One run: what corrected it, its mode, its seed, and what came of it."""

    variant: str
    mode: str
    seed: int
    ran: Whole

    @property
    def summary(self) -> Mapping[str, Any]:
        """What `summary.json` holds."""
        return self.ran.summary

    @property
    def after(self) -> float:
        """Held-out accuracy after the last step."""
        return float(self.summary["heldout_accuracy_after"])

    @property
    def main_s(self) -> float:
        """Seconds of the algorithm's steps."""
        return float(self.summary["stages"][-1]["seconds"])


def run(folder: Path, variant: str, mode: Sequence[str], seed: int, settings: Sequence[str]) -> Outcome:
    """Run the demo once."""
    algorithm, options = VARIANTS[variant]
    kind, *pace = mode
    name = f"{variant}-{kind}-{seed}".lower().translate(str.maketrans(" ", "-", "()"))
    chosen = [*pace, *options, f"run.seed={seed}", *settings]
    overrides = [argument for setting in chosen for argument in ("--set", setting)]
    ran = run_whole(folder, name, str(RECIPE), "--algorithm", algorithm, *overrides)
    return Outcome(variant=variant, mode=kind, seed=seed, ran=ran)


def main() -> None:
    """Run all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument("--staleness", type=int, default=8, metavar="STEPS", help="of the stale runs")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", dest="settings", help="as of cosmos run")
    options = parser.parse_args()
    stale = ("stale", f"sync.interval={options.staleness}", f"sync.max_staleness={options.staleness}")
    planned = [(variant, stale) for variant in options.variants.split(",")]
    planned += [("no correction", ("lockstep", "sync.mode=sync"))]
    outcomes = []
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="cosmos-offpolicy-") as folder:
        for seed in range(options.seeds):
            for variant, mode in planned:
                done = run(Path(folder), variant, mode, seed, options.settings)
                outcomes.append(done)
                said = f"{done.after:.3f}, {done.ran.seconds:.0f} s, {done.ran.cpu_s:.0f} CPU s"
                print(f"{variant}, {mode[0]}, seed {seed}: {said}", file=sys.stderr)
    show(outcomes)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a Markdown row for each variant."""
    print(
        "| correction | pace | held-out accuracy after | worst seed | staleness, mean (max) "
        "| main s | policy tok/s | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for variant, mode in dict.fromkeys((each.variant, each.mode) for each in outcomes):
        mine = [each for each in outcomes if (each.variant, each.mode) == (variant, mode)]
        after = [each.after for each in mine]
        spread = f" ± {statistics.stdev(after):.3f}" if len(after) > 1 else ""
        lag = [each.summary["staleness"] for each in mine]
        rates = [each.summary["tokens_per_s"]["policy"] or 0.0 for each in mine]
        cells = (
            variant,
            mode,
            f"{statistics.mean(after):.3f}{spread}",
            f"{min(after):.3f}",
            f"{statistics.mean(each['mean'] for each in lag):.2f} ({max(each['max'] for each in lag)})",
            f"{statistics.mean(each.main_s for each in mine):.1f}",
            f"{statistics.mean(rates):,.0f}",
            f"{statistics.mean(each.ran.cpu_s for each in mine):.0f}",
        )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
