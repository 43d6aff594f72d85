"""Writes checkpoints beside training: the state is copied first, then written by a thread.

Each process of a replica writes what it holds; the leader names the folder, marks it complete and reports.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import attrs
import psutil
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # its documented home
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as Written

from cosmos_core.errors import CheckpointError, StorageError
from cosmos_core.models.parallel.channel import Channel
from cosmos_core.policy.checkpoints.checkpoint import COMPLETE, Place, drop_undone, marker, path_of, prune, read_place
from cosmos_core.policy.training.gradients import stored
from cosmos_core.storage import failures, file_system, storage_options
from cosmos_core.storage import reason_of as words_of
from cosmos_core.transport.reports import CheckpointFailed, CheckpointSaved
from cosmos_core.weights.quantization import copy_exactly
from cosmos_core.weights.shards import LocalShard, local_shard, local_shards, shard_of
from cosmos_core.weights.snapshot import lay_out, view
from cosmos_core.weights.staging import Beside, HostMemory, device_of, page_lock

_LOG: Final = logging.getLogger(__name__)

WRITE_ERRORS: Final = (OSError, RuntimeError, ValueError, ImportError, CheckpointException, StorageError)
"""Errors of file systems and of torch's writer, besides `failures` of stores; torch's own is no `Exception`."""

RNG: Final = "rng"
THREADS: Final = 4
"""Files that a process writes at once, or reads."""
_VALUES_AT_ONCE: Final = 1 << 22
_LEAST_BYTES: Final = 16 << 20
"""Of a file, where there are several."""


@attrs.frozen(kw_only=True, eq=False)
class Copied:
    """This process's part of a state, on the CPU, where nothing else writes to it.

    Attributes:
        place: Where in the run it is.
        shares: What the process holds, by name; there once the copying is done.
        copying: The work of copying, where a device does it by itself.
        memory: That of the shares.
    """

    place: Place
    shares: Mapping[str, LocalShard]
    memory: HostMemory | None = None
    copying: Beside = attrs.field(factory=Beside)


def copy_state(
    state: Mapping[str, torch.Tensor], place: Place, room: Callable[[int], HostMemory] = HostMemory
) -> Copied:
    """Copy what this process holds of a trainer's tensors, and its random state, to the CPU.

    The tensors may change after `staging.settle`. `room` gives memory of the size that they need. Every process has the
    same random state, so one is saved; which one does not matter.
    """
    held = {**local_shards(state), RNG: local_shard(torch.get_rng_state())}
    entries, size = lay_out(shard_of(name, share) for name, share in held.items())
    memory, device = room(size), device_of(share.tensor for share in held.values())
    page_lock(memory, device)
    shares = {each.name: attrs.evolve(held[each.name], tensor=view(memory.buffer, each)) for each in entries}

    def copy() -> None:
        for name, share in held.items():
            for target, source in _pieces(shares[name].tensor, share.tensor):
                copy_exactly(target, source, non_blocking=True)

    copied = Copied(place=place, shares=shares, memory=memory)
    copied.copying.do(device, copy)
    return copied


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of target and source, to be copied in turn; values that are stored in 8 bits are made some at a time."""
    if len(stored(source)) == 1:
        yield target, source
        return
    # torchao's own copy would have the host wait.
    values, codes = target.view(-1), source.view(-1)
    for begin in range(0, len(values), _VALUES_AT_ONCE):
        piece: Any = codes[begin : begin + _VALUES_AT_ONCE]
        yield values[begin : begin + _VALUES_AT_ONCE], piece.dequantize()


def write_checkpoint(url: str, copied: Copied, channel: Channel | None = None) -> str:
    """Write a checkpoint so that it is there completely or not at all; its path.

    On a local disk the folder is written under another name and renamed; elsewhere the marker is written last.

    Args:
        url: Folder of the checkpoints, which all processes see.
        copied: This process's part.
        channel: Between the processes of the replica, all of which write.

    Raises:
        CheckpointError: It cannot be written; what was written of it is removed.
        TransportError: A process of the replica is gone.
    """
    path = path_of(url, copied.place.step)
    copied.copying.wait()
    channel = channel if channel is not None else Channel()
    try:
        files, root = file_system(path)
        if isinstance(files, LocalFileSystem):
            _write_local(Path(root), copied, channel)
        else:
            _led(channel, lambda: _clear(files, root, path, copied.place))
            _write_tensors(path, copied, channel)
            if channel.is_leader:
                files.pipe_file(f"{root}/{COMPLETE}", marker(copied.place, path))
    except failures(*WRITE_ERRORS) as error:
        raise CheckpointError(f"no checkpoint at {path}: {reason_of(error)}") from error
    return path


class SharesToSave(DefaultSavePlanner):
    """Plans to write shares of tensors, and puts the checksum of each into the checkpoint's description.

    Args:
        shares: What this process holds, by name; empty shares are left out.
    """

    def __init__(self, shares: Mapping[str, LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - torch's signature
        is_coordinator: bool = False,
    ) -> None:
        """Note who leads."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item a share."""
        items = [_item(name, share) for name, share in self._shares.items() if share.tensor.numel()]
        checksums = {}
        for item in items:
            tensor = self.resolve_data(item)
            checksums[item.index] = checksum(tensor.flatten().view(torch.uint8), tensor.dtype, tensor.shape)
        self.plan = SavePlan(items, planner_data=checksums)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each item once, with the checksum of the process that writes it."""
        plans, metadata = super().create_global_plan(all_plans)
        checksums = {item.index: plan.planner_data[item.index] for plan in plans for item in plan.items}
        return plans, dataclasses.replace(metadata, planner_data=checksums)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of an item, in the order in which they are read."""
        return self._shares[write_item.index.fqn].tensor.contiguous()


class ThreadedWriter(FsspecWriter):
    """Writes several files at once; torch's own threads would lose what fails in them."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written[list[WriteResult]]:
        """Write a file for each thread, of items that are about as large as the others'."""
        items, place = sorted(plan.items, key=_nbytes, reverse=True), plan.storage_data
        count = max(1, min(THREADS, sum(map(_nbytes, items)) // _LEAST_BYTES))
        write_file = super().write_data

        def write(number: int) -> list[WriteResult]:
            own = dataclasses.replace(place, prefix=f"{place.prefix}{number}_") if number else place
            part = dataclasses.replace(plan, items=items[number::count], storage_data=own)
            return write_file(part, planner).wait()

        done: Written[list[WriteResult]] = Written()
        with ThreadPoolExecutor(count, "checkpoint-file") as threads:
            done.set_result([result for found in threads.map(write, range(count)) for result in found])
        return done


@attrs.define(eq=False)
class CheckpointSaver:
    """Saves one checkpoint at a time on a thread.

    Attributes:
        url: Folder of the checkpoints.
        keep: Newest ones to keep.
        report: Told of each outcome, on the thread of the leader.
        channel: Between the processes of the replica, for the thread alone.
    """

    _url: str
    _keep: int
    _report: Callable[[CheckpointSaved | CheckpointFailed], None]
    _channel: Channel = attrs.field(factory=Channel)
    _thread: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    _writing: Future[None] | None = attrs.field(default=None, init=False)
    _memory: HostMemory | None = attrs.field(default=None, init=False)

    def save(self, state: Mapping[str, torch.Tensor], place: Place) -> None:
        """Have the state copied and written in the background; waits for the checkpoint before, if it is still written.

        All processes of the replica call it.
        """
        self.wait()
        self._writing = self._thread.submit(self._save, copy_state(state, place, self._room))

    def drop_undone(self, step: int, generation: int) -> None:
        """Remove what was saved of steps after the one that a generation goes on from; the leader does.

        Left where they are, they would be taken for those of the steps that come again.
        """
        if not self._channel.is_leader:
            return
        try:
            removed = drop_undone(self._url, step, generation)
        except CheckpointError as error:
            _LOG.warning("checkpoints of steps after %d, which were undone, may not all be removed: %s", step, error)
            return
        if removed:
            _LOG.warning("removed the checkpoints of steps %s, which were undone", removed)

    def check(self) -> None:
        """Raise what went wrong in the background besides the writing itself, which is reported.

        Unseen, it would leave the controller waiting for a checkpoint that nobody writes.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written; raises as `check` does."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _room(self, size: int) -> HostMemory:
        """The memory of the checkpoint before; if it has another size, it is given back before pages are taken."""
        if self._memory is None or len(self._memory.buffer) != size:
            self._memory = HostMemory(size)
        return self._memory

    def _save(self, copied: Copied) -> None:
        step, generation = copied.place.step, copied.place.generation
        try:
            path = write_checkpoint(self._url, copied, self._channel)
        except CheckpointError as error:
            if self._channel.is_leader:
                _LOG.warning("%s; training goes on", error)
                self._report(CheckpointFailed(step=step, reason=str(error), generation=generation))
            return
        if not self._channel.is_leader:
            return
        self._report(CheckpointSaved(step=step, path=path, generation=generation))
        try:
            prune(self._url, self._keep, newest=step)
        except CheckpointError as error:
            _LOG.warning("old checkpoints were not removed: %s", error)


def _write_local(final: Path, copied: Copied, channel: Channel) -> None:
    owner = channel.exchange(f"{platform.node()}@{os.getpid()}".encode())[0].decode()
    partial, replaced = (final.with_name(f".{name}@{owner}") for name in (final.name, f"{final.name}-replaced"))
    try:
        _led(channel, lambda: _sweep(partial.parent))
        _write_tensors(str(partial), copied, channel)
        if channel.is_leader:
            (partial / COMPLETE).write_bytes(marker(copied.place, str(partial)))
            _sync(partial / COMPLETE)
            _sync(partial)
            _give_way(str(final), copied.place)
            if final.exists():
                # Of the same step, before it was undone. Removing it takes time; renaming leaves hardly a gap.
                final.rename(replaced)
            partial.rename(final)
            _sync(final.parent)
    finally:
        if channel.is_leader:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Make the folder, or remove what processes of this machine that are gone left half written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(f".step-*@{platform.node()}@*"):
        pid = partial.name.rpartition("@")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(partial, ignore_errors=True)


def _clear(files: Any, root: str, path: str, place: Place) -> None:
    _give_way(path, place)
    if files.exists(f"{root}/{COMPLETE}"):
        files.rm_file(f"{root}/{COMPLETE}")
    if files.exists(root):
        files.rm(root, recursive=True)


def _give_way(path: str, place: Place) -> None:
    """Leave alone what a later generation saved of the step: this process was given up, and comes too late.

    Raises:
        OSError: There is such a checkpoint.
    """
    try:
        made = read_place(path)
    except CheckpointError:
        return
    if made.run_id == place.run_id and made.generation > place.generation:
        raise OSError(
            f"generation {made.generation} has saved the step already, and this is generation {place.generation}: the "
            "run has gone on without this replica"
        )


def _led(channel: Channel, work: Callable[[], None]) -> None:
    """Let the leader work; if it fails, it fails on all, so that none waits."""
    said, failure = channel.lead(work, reason_of)
    if failure is not None:
        raise failure
    if said:
        raise OSError(said)


def _write_tensors(path: str, copied: Copied, channel: Channel) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        save(
            {name: share.tensor for name, share in copied.shares.items()},
            storage_writer=ThreadedWriter(path, **storage_options(path)),
            planner=SharesToSave(copied.shares),
            process_group=channel.group,
            no_dist=channel.group is None,
        )


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: BaseException) -> str:
    """The file system's own words, or those of what else went wrong, which torch wraps."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    root: BaseException = error
    while not isinstance(root, OSError) and (inner := root.__cause__ or root.__context__) is not None:
        root = inner
    return words_of(root if isinstance(root, OSError) else error)


_SECTOR_BYTES: Final = 512
_BLOCK_BYTES: Final = 1 << 22
"""Whole sectors, few enough to be in the processor's cache still when they are summed."""


def checksum(
    values: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], fill: Callable[[torch.Tensor], object] | None = None
) -> int:
    """The CRC-32 of a tensor's dtype, shape, sums (mod 2^64) of each 512 bytes as 64 words, and last bytes.

    A changed word always changes it. Sectors that are lost, swapped or foreign escape with a probability of 2^-32;
    words that change places within one sector do. zlib's CRC-32 of all bytes takes several times as long.

    Args:
        values: The tensor's bytes, on the CPU.
        dtype: Of the tensor.
        shape: Of the tensor.
        fill: Puts the bytes of each block there before it is looked at.
    """
    found = zlib.crc32(f"{dtype} {tuple(shape)}".encode())
    for block in (values[begin : begin + _BLOCK_BYTES] for begin in range(0, len(values), _BLOCK_BYTES)):
        if fill is not None:
            fill(block)
        end = len(block) // _SECTOR_BYTES * _SECTOR_BYTES
        sums = block[:end].view(torch.int64).view(-1, _SECTOR_BYTES // 8).sum(1)
        found = zlib.crc32(block[end:].numpy().data, zlib.crc32(sums.numpy().data, found))
    return found


def chunk_of(share: LocalShard) -> ChunkStorageMetadata:
    """The part of its tensor that a share is."""
    return ChunkStorageMetadata(offsets=torch.Size(share.start), sizes=share.tensor.shape)


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _item(name: str, share: LocalShard) -> WriteItem:
    chunk = chunk_of(share)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(share.tensor), size=torch.Size(share.shape)
        ),
    )
