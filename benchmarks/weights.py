"""Weight sync of a 100 MB model between two processes: bytes, seconds and stall, by transport.

    python benchmarks/weights.py [--megabytes 100] [--rounds 5]

stage: training waits (copy into shared memory, cast to bf16). seal: digest, beside training. fetch: until the last
slice is there. write: copying it into the engine's weights, which generation waits for. verify: digest read back.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.transport.messages import WeightTarget
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import Layout, WeightReceiver
from cosmos_core.weights.shards import ShardMap, dtype_name

HIDDEN = 1024


def model(megabytes: int) -> dict[str, torch.Tensor]:
    """Layers of a transformer's shapes, float32, that make `megabytes` in bf16."""
    rows = megabytes * 1_000_000 // 2 // HIDDEN
    layers = {f"layers.{i}.weight": torch.randn(3 * HIDDEN, HIDDEN) for i in range(rows // (3 * HIDDEN))}
    norms = {f"layers.{i}.norm": torch.ones(HIDDEN) for i in range(len(layers))}
    return {**layers, **norms, "embed": torch.randn(rows % (3 * HIDDEN) + 1, HIDDEN)}


def publish(megabytes: int, rounds: int) -> None:
    """The policy's process: prints what each stage and seal took, then serves until its input closes."""
    torch.set_num_threads(1)
    tensors = model(megabytes)
    with WeightPublisher("bench") as publisher:
        for version in range(rounds):
            publisher.retain(version)
            start = time.perf_counter()
            snapshot = publisher.stage(version, tensors, torch.bfloat16)
            staged = time.perf_counter()
            published = publisher.seal(snapshot)
            print(
                publisher.endpoint, version, published.digest, staged - start, time.perf_counter() - staged, flush=True
            )
            sys.stdin.readline()


def fetch(transport: str, megabytes: int, rounds: int) -> dict[str, float]:
    """The rollout's process: medians over the rounds, in seconds."""
    command = [sys.executable, __file__, "--publish", "--megabytes", str(megabytes), "--rounds", str(rounds)]
    loaded = {name: tensor.bfloat16() for name, tensor in model(megabytes).items()}
    shards = ShardMap.of_tensors(loaded)
    layout: Layout = {0: [(piece, dtype_name(torch.bfloat16)) for piece in shards.ranks[0]]}
    times: dict[str, list[float]] = {}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as policy,
        WeightReceiver("auto" if transport == "shared-memory" else "zmq", run_id="bench", host="here") as receiver,
    ):
        assert policy.stdin
        assert policy.stdout
        for _ in range(rounds):
            endpoint, version, digest, stage_s, seal_s = policy.stdout.readline().split()
            target = WeightTarget(version=int(version), digest=digest, sources=(endpoint,), hosts=("here",))
            start = time.perf_counter()
            with receiver.fetch(target, layout, 60) as pieces:
                arrived = list(pieces)
                fetched = time.perf_counter()
                for _, piece, data in arrived:
                    place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                    loaded[piece.name][place].copy_(data)
            written = time.perf_counter()
            assert digest_of(loaded) == digest
            verified = time.perf_counter()
            measured = (float(stage_s), float(seal_s), fetched - start, written - fetched, verified - written)
            for name, value in zip(("stage", "seal", "fetch", "write", "verify"), measured, strict=True):
                times.setdefault(name, []).append(value)
            policy.stdin.write("\n")
            policy.stdin.flush()
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    """Run both transports and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.megabytes, options.rounds)
        return
    torch.set_num_threads(1)
    table = Table(title=f"Weight sync, {options.megabytes} MB in bf16, median of {options.rounds}, milliseconds")
    for column in ("transport", "stage (training waits)", "seal", "fetch", "write", "verify", "fetch + write GB/s"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for transport in ("shared-memory", "zmq"):
        times = fetch(transport, options.megabytes, options.rounds)
        rate = options.megabytes / 1000 / (times["fetch"] + times["write"])
        table.add_row(transport, *(f"{1000 * value:.1f}" for value in times.values()), f"{rate:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
