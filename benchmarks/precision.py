"""What fewer bits cost: the mismatch between trainer and rollout, and quantising at the source.

    python benchmarks/precision.py [--steps 12] [--warmup 200] [--megabytes 128] [--only mismatch | source]

Mismatch: `recipes/arithmetic.toml`, a supervised warm-up and some steps of GRPO in lockstep, everything in float32 but
what a row names. KL is `mismatch_kl`, between the policy's log-probs and the engine's at the same weights, a token; the
ratio is the largest of a token that was trained on.

Source: what one policy process does to publish its float32 matrices, in CPU seconds of its own, on one thread, and the
most private memory that it takes meanwhile; the published copy itself lies in shared memory and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
from memory import Memory
from rich.console import Console
from rich.table import Table

from cosmos_core.control.journal import entries
from cosmos_core.protocols.quantization import FORMATS, Format
from cosmos_core.run.follower import Follower
from cosmos_core.weights.quantization import matrix_shares
from cosmos_core.weights.snapshot import Snapshot, take_snapshot

RECIPE: Final = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
CASES: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": (),
    "rollout.precision = bf16": ("rollout.precision='bf16'",),
    **{f"quantization = {name}": (f"rollout.quantization='{name}'",) for name in FORMATS},
}
WIDTH: Final = 1024
ROUNDS: Final = 5
MB: Final = 1e6


@attrs.frozen(kw_only=True)
class Mismatch:
    """Of the steps of GRPO of one run."""

    kl: float
    largest_kl: float
    largest_ratio: float


def mismatch(folder: Path, settings: tuple[str, ...], *, warmup: int, steps: int) -> Mismatch:
    """Run the recipe once.

    Args:
        folder: Where runs go.
        settings: What differs from float32.
        warmup: Supervised steps.
        steps: Steps of GRPO.
    """
    chosen = (
        f"run.output_dir={json.dumps(str(folder))}",
        *(f"warmup.steps={warmup}", f"run.steps={steps}", "sync.mode='sync'", "evaluation.prompts=0"),
        *("policy.precision='fp32'", "rollout.precision='fp32'", "tracking.hooks=[]"),
        *settings,
    )
    name = f"run-{len(list(folder.iterdir()))}"
    overrides = [argument for setting in chosen for argument in ("--set", setting)]
    command = [sys.executable, "-m", "cosmos_core.cli", "run", str(RECIPE), "--name", name, *overrides]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{settings} failed:\n{done.stdout}{done.stderr}")
    follower = Follower()
    follower.fold(entries(folder / name / "journal.sqlite"))
    measured = [timed.record.metrics for timed in follower.steps if "mismatch_kl" in timed.record.metrics]
    if not measured:
        sys.exit(f"{settings}: none of {steps} steps had a group to train on; raise --warmup or --steps")
    kls = [metrics["mismatch_kl"] for metrics in measured]
    ratio = max(metrics["mismatch_max_ratio"] for metrics in measured)
    return Mismatch(kl=fmean(kls), largest_kl=max(kls), largest_ratio=ratio)


@attrs.frozen(kw_only=True)
class Published:
    """One publication: CPU seconds, bytes of scratch memory, bytes of the copy."""

    cpu_s: float
    scratch: int
    nbytes: int


def published(matrices: Mapping[str, torch.Tensor], form: Format | None) -> Published:
    """Publish some matrices again and again, into the file of the version before, as a run does."""
    shapes = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
    spare: Snapshot | None = None
    seconds, scratch = [], 0
    for version in range(ROUNDS + 1):
        memory = Memory()
        with memory.watched():
            began = time.process_time()
            shares = {} if form is None else matrix_shares(form, matrices, shapes)
            spare = take_snapshot(
                version, matrices, torch.bfloat16, quantised=shares, spare=None if spare is None else spare.file
            )
            seconds.append(time.process_time() - began)
        scratch = max(scratch, memory.peak)
    assert spare is not None
    spare.file.close()
    # The first one makes the file.
    return Published(cpu_s=median(seconds[1:]), scratch=scratch, nbytes=spare.nbytes)


def mismatch_table(arguments: argparse.Namespace) -> Table:
    """A run for each case."""
    table = Table("rollout", "mean KL", "largest KL of a step", "largest ratio of a token")
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in CASES.items():
            found = mismatch(Path(folder), settings, warmup=arguments.warmup, steps=arguments.steps)
            table.add_row(name, f"{found.kl:.1e}", f"{found.largest_kl:.1e}", f"{found.largest_ratio:.6f}")
    return table


def source_table(megabytes: int) -> Table:
    """Each format against a copy in bfloat16, of the same matrices."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    number = max(1, round(megabytes * MB / (4 * WIDTH * 4 * WIDTH)))
    matrices = {
        f"layers.{index}.{name}.weight": torch.randn(shape)
        for index in range((number + 1) // 2)
        for name, shape in (("up_proj", (4 * WIDTH, WIDTH)), ("down_proj", (WIDTH, 4 * WIDTH)))
    }
    held = sum(matrix.nbytes for matrix in matrices.values())
    largest = max(matrix.nbytes for matrix in matrices.values())
    title = f"{held / MB:.0f} MB of float32 in {len(matrices)} matrices of {largest / MB:.0f} MB"
    table = Table("published as", "MB", "CPU s", "times the copy", "scratch MB", title=title)
    plain = published(matrices, None)
    for name, form in {"bfloat16": None, **FORMATS}.items():
        found = plain if form is None else published(matrices, form)
        ratio = f"{found.cpu_s / plain.cpu_s:.1f}"
        table.add_row(name, f"{found.nbytes / MB:.0f}", f"{found.cpu_s:.3f}", ratio, f"{found.scratch / MB:.0f}")
    return table


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--only", choices=("mismatch", "source"))
    arguments = parser.parse_args()
    console = Console()
    if arguments.only != "mismatch":
        console.print(source_table(arguments.megabytes))
    if arguments.only != "source":
        console.print(mismatch_table(arguments))


if __name__ == "__main__":
    main()
