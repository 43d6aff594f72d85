"""The cost of a checkpoint's checksums: a load that is verified and a plain one, in turns, and their part of a save.

    python benchmarks/checkpoints.py [--megabytes 600] [--rounds 15] [--folder DIR]

Weights in float32 and two moments of each, of a transformer's shapes, written by one process and loaded by it. Plain
is the load of the same files with a `complete.json` that notes none of them, as of a release without checksums: by
`torch.load`. The verified one reads each tensor into the same memory, block by block, and sums each block; without the
sums it shows what they cost. From disk: the kernel's copy of the files is dropped before each load; from memory: they
were just read. Each row has the median and the fastest of all rounds; other work on the machine makes the first larger.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.policy.checkpoints import reader
from cosmos_core.policy.checkpoints.checkpoint import COMPLETE, Place, marker, path_of, read_place
from cosmos_core.policy.checkpoints.saver import checksum, copy_state, write_checkpoint
from cosmos_core.weights.shards import local_shards

HIDDEN: Final = 1024
MB: Final = 1e6
PLAIN, UNSUMMED, VERIFIED = "plain", "as verified, without sums", "verified"


@attrs.frozen
class Took:
    """One load: seconds, and seconds of CPU."""

    wall_s: float
    cpu_s: float


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Weights and moments that make `megabytes`."""
    layers = max(1, megabytes * 1_000_000 // (3 * 4 * 6 * HIDDEN * HIDDEN))
    state: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, shape in (("norm", (HIDDEN,)), ("up", (3 * HIDDEN, HIDDEN)), ("down", (HIDDEN, 3 * HIDDEN))):
            for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                state[f"{kind}.layers.{layer}.{name}"] = torch.randn(shape)
    return state


def drop(folder: str) -> None:
    """Make the kernel forget the content of a folder's files."""
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], object]) -> Took:
    """The time that something takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def written(state: Mapping[str, torch.Tensor], folder: str) -> tuple[dict[str, str], Took, Took]:
    """The checkpoint of each way to load it; the time of a save, and of its checksums."""
    copied = copy_state(state, Place(run_id="benchmark", step=1, stage=0, nonfinite_steps=0))
    save = timed(lambda: write_checkpoint(folder, copied))
    tensors = [share.tensor for share in copied.shares.values()]
    sums = timed(lambda: [checksum(each.flatten().view(torch.uint8), each.dtype, each.shape) for each in tensors])
    verified, plain = path_of(folder, 1), path_of(f"{folder}/plain", 1)
    Path(plain).mkdir(parents=True)
    for path in Path(verified).iterdir():
        Path(plain, path.name).hardlink_to(path)
    Path(plain, COMPLETE).unlink()
    Path(plain, COMPLETE).write_bytes(marker(attrs.evolve(read_place(verified), contents=None)))
    os.sync()
    return {PLAIN: plain, VERIFIED: verified, UNSUMMED: verified}, save, sums


def fill_only(
    values: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], fill: Callable[[torch.Tensor], object]
) -> object:
    """Read as `checksum` has it read, and find whatever is expected."""
    del dtype, shape
    for block in values.split(1 << 22):
        fill(block)
    return mock.ANY


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to write; a folder of temporary files if not given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    state = state_of(options.megabytes)
    megabytes = sum(tensor.nbytes for tensor in state.values()) / MB
    shares = local_shards(state)
    found: dict[tuple[str, str], list[Took]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths, save, sums = written(state, folder)
        for number in range(options.rounds + 1):
            for source in ("disk", "memory"):
                # Each comes first as often as last.
                for way in sorted(paths, reverse=bool(number % 2)):
                    if source == "disk":
                        drop(paths[way])
                    summing = fill_only if way == UNSUMMED else checksum
                    with mock.patch.object(reader, "checksum", summing):
                        took = timed(lambda path=paths[way]: reader.load_shares(path, shares))  # type: ignore[misc]
                    if number:
                        found.setdefault((source, way), []).append(took)
    table = Table(title=f"{megabytes:.0f} MB in {len(state)} tensors, {options.rounds} rounds")
    for column in ("read from", "load", "median s", "fastest s", "CPU s", "median / plain", "fastest / plain"):
        table.add_column(column, justify="left" if column in ("read from", "load") else "right")
    for (source, way), loads in found.items():
        plain = found[source, PLAIN]
        half, best = (pick([each.wall_s for each in loads]) for pick in (median, min))
        table.add_row(
            *(source, way, f"{half:.3f}", f"{best:.3f}", f"{median(each.cpu_s for each in loads):.3f}"),
            f"{half / median(each.wall_s for each in plain):.3f}",
            f"{best / min(each.wall_s for each in plain):.3f}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(f"A save took {save.wall_s:.2f} s beside training, {sums.wall_s:.2f} s of it for checksums.")


if __name__ == "__main__":
    main()
