"""Weights from two policy ranks to two rollout ranks: slices that are pulled, against gather and broadcast.

    python benchmarks/weights.py [--megabytes 100] [--rounds 5]

The policy's ranks hold halves of the rows (fsdp 2, float32), the rollout's halves of rows, of columns, or all of a
tensor (tp 2, bf16); all four are processes of one gloo world on this machine. Ways, on the same processes:

gather, broadcast: the first policy rank gathers the whole model, then broadcasts it; each rollout rank takes its part.
tensor by tensor: the same, one tensor after the other, so that no rank holds more than one whole tensor.
slices, shared memory | zmq | gloo | disk: this package. A snapshot, its digest, slices pulled as planned, digests of
what was loaded. On a disk, here a folder of temporary files, the snapshot is written before it is announced.

moved: bytes that any rank got of others. extra: the most memory that a policy or a rollout rank took on top of its
weights, snapshots included. update: until the last rollout rank has the version. training, rollout: how long each stood
still. Digests are part of slices' times (verified: reading them back); the others verify nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch
import torch.distributed as dist
from memory import Memory
from rich.console import Console
from rich.table import Table

from cosmos_core.protocols import TensorSlice
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import slices
from cosmos_core.weights.digest import Digests, add_digests, combine
from cosmos_core.weights.disk import VersionWriter
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import Transport, WeightReceiver
from cosmos_core.weights.shards import LocalShard
from cosmos_core.weights.staging import upload

HIDDEN: Final = 1024
POLICY: Final = (0, 1)
ROLLOUT: Final = (2, 3)
DTYPE: Final = torch.bfloat16
MB: Final = 1e6

Parts: TypeAlias = Mapping[str, TensorSlice]


@attrs.frozen(kw_only=True)
class Measured:
    """One update, as one rank saw it: bytes it got, most bytes it took, seconds."""

    moved: int
    extra: int
    update_s: float
    still_s: float
    verified_s: float


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a transformer's shapes that make `megabytes` in bf16."""
    rows = megabytes * 1_000_000 // 2 // HIDDEN
    layers = rows // (6 * HIDDEN)
    found: dict[str, tuple[int, ...]] = {"embed": (rows - layers * 6 * HIDDEN + 1, HIDDEN)}
    for layer in range(layers):
        found[f"layers.{layer}.norm"] = (HIDDEN,)
        found[f"layers.{layer}.up"] = (3 * HIDDEN, HIDDEN)
        found[f"layers.{layer}.down"] = (HIDDEN, 3 * HIDDEN)
    return found


def half(name: str, shape: tuple[int, ...], dim: int, which: int) -> TensorSlice:
    """One of two parts along a dim; the whole if that is negative."""
    if dim < 0:
        return slices.whole(name, shape)
    first = 0 if which == 0 else (shape[dim] + 1) // 2
    size = (shape[dim] + 1) // 2 if which == 0 else shape[dim] // 2
    start, sizes = [0] * len(shape), list(shape)
    start[dim], sizes[dim] = first, size
    return TensorSlice(name=name, start=tuple(start), shape=tuple(sizes))


def split_of(name: str) -> int:
    """The dim along which the rollout's ranks hold halves of a tensor; -1 if they hold all of it."""
    return 1 if name.endswith("down") else -1 if name.endswith("norm") else 0


class Rank:
    """One process, with what it holds."""

    def __init__(self, megabytes: int, device: str = "cpu") -> None:
        self.rank = dist.get_rank()
        self.shapes = shapes(megabytes)
        self.is_policy = self.rank in POLICY
        self.senders = dist.new_group([POLICY[0], *ROLLOUT])
        dims = {name: 0 if self.is_policy else split_of(name) for name in self.shapes}
        self.parts: Parts = {n: half(n, shape, dims[n], self.rank % 2) for n, shape in self.shapes.items()}
        generator = torch.Generator(device).manual_seed(self.rank)
        self.tensors = {
            name: torch.randn(part.shape, generator=generator, device=device)
            if self.is_policy
            else torch.zeros(part.shape, dtype=DTYPE, device=device)
            for name, part in self.parts.items()
        }

    def gathered(self, name: str) -> torch.Tensor | None:
        """The whole tensor on the first policy rank, which gets the other's half."""
        mine = self.tensors[name].to(DTYPE)
        if self.rank != POLICY[0]:
            dist.send(mine.view(torch.uint8), POLICY[0])
            return None
        other = half(name, self.shapes[name], 0, 1)
        whole = torch.empty(self.shapes[name], dtype=DTYPE)
        whole[: other.start[0]] = mine
        got = torch.empty(other.shape, dtype=DTYPE)
        dist.recv(got.view(torch.uint8), POLICY[1])
        whole[other.start[0] :] = got
        return whole

    def broadcast(self, name: str, whole: torch.Tensor | None) -> torch.Tensor | None:
        """The whole tensor on every rollout rank."""
        if self.rank == POLICY[1]:
            return None
        data = torch.empty(self.shapes[name], dtype=DTYPE) if whole is None else whole
        dist.broadcast(data.view(torch.uint8), POLICY[0], group=self.senders)
        return data

    def take(self, name: str, whole: torch.Tensor | None) -> None:
        """Copy a rollout rank's part out of the whole."""
        if not self.is_policy and whole is not None:
            self.tensors[name].copy_(whole[slices.within(self.parts[name], slices.whole(name, self.shapes[name]))])

    def received(self) -> int:
        """Bytes that this rank gets when all is gathered, then broadcast."""
        if not self.is_policy:
            return sum(_nbytes(shape) for shape in self.shapes.values())
        if self.rank == POLICY[0]:
            return sum(_nbytes(half(name, shape, 0, 1).shape) for name, shape in self.shapes.items())
        return 0


def at_once(rank: Rank) -> Measured:
    """Gather the whole model, then broadcast it."""
    memory, start = Memory(), time.perf_counter()
    with memory.watched():
        gathered = {name: rank.gathered(name) if rank.is_policy else None for name in rank.shapes}
        whole = {name: rank.broadcast(name, gathered.pop(name)) for name in rank.shapes}
        for name, data in whole.items():
            rank.take(name, data)
    seconds = time.perf_counter() - start
    del whole
    return Measured(moved=rank.received(), extra=memory.peak, update_s=seconds, still_s=seconds, verified_s=0.0)


def by_tensor(rank: Rank) -> Measured:
    """Gather and broadcast one tensor after the other."""
    memory, start = Memory(), time.perf_counter()
    with memory.watched():
        for name in rank.shapes:
            rank.take(name, rank.broadcast(name, rank.gathered(name) if rank.is_policy else None))
    seconds = time.perf_counter() - start
    return Measured(moved=rank.received(), extra=memory.peak, update_s=seconds, still_s=seconds, verified_s=0.0)


class Slices:
    """This package, with one transport."""

    def __init__(self, transport: Transport, folder: str) -> None:
        self.transport = transport
        self.folder = folder
        self.version = 0
        self.publisher: WeightPublisher | None = None

    def __call__(self, rank: Rank) -> Measured:
        """One update, of a version of its own."""
        self.version += 1
        return self._publish(rank) if rank.is_policy else self._load(rank)

    def _publish(self, rank: Rank) -> Measured:
        memory, start = Memory(), time.perf_counter()
        shards = {
            n: LocalShard(tensor=rank.tensors[n], start=part.start, shape=rank.shapes[n])
            for n, part in rank.parts.items()
        }
        if self.publisher is None:
            is_stored = self.transport == "disk"
            writer = VersionWriter(self.folder, "bench", is_only=True, removes=rank.rank == 0) if is_stored else None
            # For all rounds: the memory of a version is taken for the next one, as in a run.
            self.publisher = WeightPublisher("bench", writer=writer)
        publisher = self.publisher
        with memory.watched():
            snapshot = publisher.stage(self.version, {**rank.tensors, **shards}, DTYPE)
            still_s = time.perf_counter() - start
            parts = _exchanged(snapshot.digests())
            total = add_digests(parts[policy] for policy in POLICY)
            published = publisher.seal(snapshot, digests=total)
            _exchanged((publisher.endpoint, published.digest))
            loaded = _exchanged(None)
        # What both rollout ranks hold in whole was digested twice.
        partial = [{n: d for n, d in loaded[r].items() if r == ROLLOUT[0] or split_of(n) >= 0} for r in ROLLOUT]
        assert combine(add_digests(partial)) == published.digest, "what was loaded is not what was published"
        publisher.retain(self.version + 1)
        return Measured(
            moved=0,
            extra=memory.peak + snapshot.file.size,
            update_s=time.perf_counter() - start,
            still_s=still_s,
            verified_s=0.0,
        )

    def close(self) -> None:
        """Drop what is published."""
        if self.publisher is not None:
            self.publisher.close()

    def _load(self, rank: Rank) -> Measured:
        memory, start = Memory(), time.perf_counter()
        _exchanged({})
        found = [each for each in _exchanged(None) if each is not None]
        digest = found[0][1]
        target = WeightTarget(
            version=self.version, digest=digest, sources=tuple(each[0] for each in found), hosts=("here",) * len(found)
        )
        layout = {
            each: [(half(name, shape, split_of(name), each), "bfloat16") for name, shape in rank.shapes.items()]
            for each in (0, 1)
        }
        mine = [rank.rank % 2]
        directory = self.folder if self.transport == "disk" else None
        transport = WeightReceiver(self.transport, run_id="bench", host="here", directory=directory)
        with memory.watched(), transport as receiver, receiver.fetch(target, layout, 60, ranks=mine) as pieces:
            arrived = list(pieces)
            paused = time.perf_counter()
            upload(
                (rank.tensors[piece.name][slices.within(piece, rank.parts[piece.name])], data)
                for _, piece, data in arrived
            )
            written = time.perf_counter()
            loaded = Digests()
            for name, tensor in rank.tensors.items():
                loaded.add(name, tensor, start=rank.parts[name].start, shape=rank.shapes[name])
            digests = loaded.found()
        end = time.perf_counter()
        moved = sum(data.nbytes for _, _, data in arrived)
        del arrived, pieces
        _exchanged(digests)
        return Measured(
            moved=moved, extra=memory.peak, update_s=end - start, still_s=end - paused, verified_s=end - written
        )


WAYS: Final[Mapping[str, Callable[[str], Callable[[Rank], Measured]]]] = {
    "gather, broadcast": lambda _: at_once,
    "tensor by tensor": lambda _: by_tensor,
    "slices, shared memory": lambda folder: Slices("shared-memory", folder),
    "slices, zmq": lambda folder: Slices("zmq", folder),
    "slices, gloo": lambda folder: Slices("gloo", folder),
    "slices, disk": lambda folder: Slices("disk", folder),
}


def run(
    megabytes: int, rounds: int, folder: str, ways: Sequence[str] = tuple(WAYS), device: str = "cpu"
) -> dict[str, list[Measured]]:
    """Every way on this rank, after one round to warm up."""
    if device == "cpu":
        torch.set_num_threads(1)
    rank = Rank(megabytes, device)
    measured: dict[str, list[Measured]] = {}
    for name in ways:
        way = WAYS[name](folder)
        for _ in range(rounds + 1):
            dist.barrier()
            measured.setdefault(name, []).append(way(rank))
        if isinstance(way, Slices):
            way.close()
    return {name: found[1:] for name, found in measured.items()}


def _exchanged(said: Any) -> list[Any]:
    """What each rank says, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def _nbytes(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * DTYPE.itemsize


def row(name: str, ranks: Sequence[Sequence[Measured]]) -> list[str]:
    """A line of the table: medians over the rounds of the rank with the most."""

    def most(number: str, chosen: Sequence[int]) -> float:
        return median(max(getattr(ranks[r][n], number) for r in chosen) for n in range(len(ranks[0])))

    everybody = (*POLICY, *ROLLOUT)
    moved = median(sum(ranks[r][n].moved for r in everybody) for n in range(len(ranks[0])))
    return [
        name,
        f"{moved / MB:.0f}",
        f"{most('extra', POLICY) / MB:.0f}",
        f"{most('extra', ROLLOUT) / MB:.0f}",
        *(
            f"{1000 * most(number, chosen):.0f}"
            for number, chosen in (
                ("update_s", ROLLOUT),
                ("still_s", POLICY),
                ("still_s", ROLLOUT),
                ("verified_s", ROLLOUT),
            )
        ),
    ]


def main() -> None:
    """Run every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cosmos-bench-") as folder:
        ranks = len(POLICY) + len(ROLLOUT)
        found = run_world(ranks, run, options.megabytes, options.rounds, folder, timeout_s=600)
    table = Table(title=f"Weights of {options.megabytes} MB in bf16, medians of {options.rounds}")
    columns = (
        "moved MB",
        "policy extra MB",
        "rollout extra MB",
        "update ms",
        "training ms",
        "rollout ms",
        "verified ms",
    )
    table.add_column("way")
    for column in columns:
        table.add_column(column, justify="right")
    for name in WAYS:
        table.add_row(*row(name, [each[name] for each in found]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
