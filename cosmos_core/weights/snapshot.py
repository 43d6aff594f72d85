"""A copy of the weights in the rollout's dtype, in shared memory, from which every receiver reads.

Where there is no room for it, a `WeightSyncError` says so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.sockets import Closing
from cosmos_core.weights import slices, staging
from cosmos_core.weights.digest import Digests
from cosmos_core.weights.quantization import MatrixShare, copy_exactly, not_finite
from cosmos_core.weights.shards import (
    EngineLayout,
    LocalShard,
    ShardMap,
    TensorFacts,
    TensorShard,
    cast,
    local_shard,
    shard_of,
    torch_dtype,
)
from cosmos_core.weights.shared_memory import HEADER_BYTES, SharedFile
from cosmos_core.weights.staging import Beside, copies_itself, device_of, page_lock
from cosmos_core.weights.wire import Origin

_LOG: Final = logging.getLogger(__name__)
_ALIGNMENT: Final = 64


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """The slices of one rank at one version.

    Attributes:
        token: Random, unique.
        copying: The work of writing it, where a device does it by itself; then with the digests of what is written.
        itemsizes: Bytes of an element of each tensor.
    """

    version: int
    token: str
    entries: tuple[TensorShard, ...]
    file: SharedFile
    copying: Beside = attrs.field(factory=Beside, init=False)
    _sums: Digests = attrs.field(factory=Digests, init=False, repr=False)
    # Of quantised matrices by name: a number on the device, which is not asked for it before all is written.
    _finite: dict[str, torch.Tensor] = attrs.field(factory=dict, init=False, repr=False)
    # Made once, as requests for a few slices each come for tens of thousands of tensors.
    itemsizes: Mapping[str, int] = attrs.field(
        init=False,
        default=attrs.Factory(lambda self: {each.name: each.facts.itemsize for each in self.entries}, takes_self=True),
    )
    _by_name: Mapping[str, Sequence[TensorShard]] = attrs.field(init=False, repr=False)

    @_by_name.default
    def _index(self) -> Mapping[str, Sequence[TensorShard]]:
        found: dict[str, list[TensorShard]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, []).append(entry)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return sum(entry.nbytes for entry in self.entries)

    def digests(self) -> dict[str, int]:
        """The number that this snapshot adds to the digest of each tensor, once it is written."""
        found = self.copying.ask(self._sums.found)
        if not found:
            for entry in self.entries:
                self._sums.add(entry.name, view(self.file.buffer, entry), start=entry.start, shape=entry.shape)
            found = self._sums.found()
        return found

    def problem(self) -> str:
        """The reason why it cannot be published, once it is written: a matrix that is not finite; empty if it can."""
        return self.copying.ask(lambda: not_finite(self._finite))

    def close(self) -> None:
        """Drop it, once nothing writes to it any more."""
        with contextlib.suppress(RuntimeError):  # a device that has failed does not
            self.copying.wait()
        self.file.close()

    def put(
        self, entries: Sequence[TensorShard], shard: LocalShard, matrix: MatrixShare | None, *, beside: bool
    ) -> None:
        """Copy what is sent of a shard, or codes and scales of it; once this returns none of that is held any more."""
        content = [shard.sent()]
        if matrix is not None:
            *content, self._finite[matrix.name] = matrix.quantise(*content)
        for entry, data in zip(entries, content, strict=True):
            if beside:
                self._fill(entry, data)
            else:
                copy_exactly(view(self.file.buffer, entry), data)

    def _fill(self, entry: TensorShard, data: torch.Tensor) -> None:
        """Have the device of `data` add up its digest and copy it to its place."""
        target = view(self.file.buffer, entry)
        for piece in slices.chunks(entry.piece, staging.BUFFER_BYTES // target.element_size()):
            index = slices.within(piece, entry.piece)
            part = data[index].to(target.dtype)
            self._sums.add(entry.name, part, start=piece.start, shape=entry.shape)
            copy_exactly(target[index], part, non_blocking=True)

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Copy the content of a slice to wherever the snapshot holds parts of it."""
        for entry in self._by_name.get(piece.name, ()):
            common = slices.overlap(entry.piece, piece)
            if common is not None:
                part = view(self.file.buffer, entry)[slices.within(common, entry.piece)]
                copy_exactly(part, data[slices.within(common, piece)])

    def finds(self, piece: TensorSlice) -> TensorShard | None:
        """The entry that a slice lies within; None if the snapshot does not hold it."""
        held = self._by_name.get(piece.name, ())
        return next((entry for entry in held if slices.contains(entry.piece, piece)), None)

    def read(self, piece: TensorSlice) -> memoryview | None:
        """The C-contiguous bytes of a slice, uncopied if they lie so; None if the snapshot does not hold it."""
        entry = self.finds(piece)
        if entry is None:
            return None
        part = view(self.file.buffer, entry)[slices.within(piece, entry.piece)]
        nbytes = part.numel() * part.element_size()
        if not nbytes:
            return memoryview(b"")
        if part.is_contiguous():
            first = entry.offset + part.storage_offset() * part.element_size()
            return self.file.lend()[first : first + nbytes]
        gathered = bytearray(nbytes)
        torch.frombuffer(gathered, dtype=part.dtype).view(part.shape).copy_(part)
        return memoryview(gathered)


def take_snapshot(
    version: int,
    tensors: Mapping[str, torch.Tensor | LocalShard],
    dtype: torch.dtype | None,
    *,
    quantised: Mapping[str, MatrixShare] | None = None,
    directory: Path | None = None,
    spare: SharedFile | None = None,
) -> Snapshot:
    """Copy tensors into a shared-memory file; the originals may change again after `staging.settle`.

    They are this rank's, or shards, by canonical name, on any device; floating-point ones are cast to `dtype` on the
    way. A matrix to be quantised that is not finite is a WeightSyncError, or on a GPU the snapshot's `problem`. `spare`
    is the file of a snapshot that is not needed any more, to be used if it can be, else closed.
    """
    shares = quantised or {}
    held = {name: each if isinstance(each, LocalShard) else local_shard(each) for name, each in tensors.items()}
    parts = {
        name: shares[name].parts() if name in shares else (shard_of(name, shard, cast(shard.tensor, dtype)),)
        for name, shard in held.items()
    }
    snapshot = _laid_out(version, (part for made in parts.values() for part in made), directory, spare)
    device = device_of(shard.tensor for shard in held.values())

    def copy() -> None:
        rest = iter(snapshot.entries)
        for name, shard in held.items():
            snapshot.put([next(rest) for _ in parts[name]], shard, shares.get(name), beside=copies_itself(device))

    with contextlib.ExitStack() as undo:
        undo.callback(snapshot.file.close)
        page_lock(snapshot.file, device)
        snapshot.copying.do(device, copy)
        if not copies_itself(device) and (problem := snapshot.problem()):
            raise WeightSyncError(problem)
        undo.pop_all()
    return snapshot


def blank_snapshot(
    version: int, layout: EngineLayout, *, directory: Path | None = None, spare: SharedFile | None = None
) -> Snapshot:
    """A snapshot with room for all that an engine holds, each element once, to be written slice by slice.

    `spare` is as of `take_snapshot`.
    """
    facts = ShardMap.of_layout(layout).tensors
    held = [
        TensorShard(name=piece.name, start=piece.start, size=piece.shape, **attrs.asdict(facts[piece.name]))
        for piece in slices.disjoint([piece for pieces in layout.values() for piece, _ in pieces])
    ]
    return _laid_out(version, held, directory, spare)


def lay_out(shards: Iterable[TensorShard], first: int = 0) -> tuple[tuple[TensorShard, ...], int]:
    """Place shards one after another from a byte on; with the byte after the last one."""
    entries, size = list[TensorShard](), first
    for shard in shards:
        entries.append(attrs.evolve(shard, offset=-(-size // _ALIGNMENT) * _ALIGNMENT))
        size = entries[-1].offset + shard.nbytes
    return tuple(entries), size


def view(buffer: mmap.mmap, entry: TensorShard) -> torch.Tensor:
    """A shard as a tensor over the memory that it lies in."""
    dtype = torch_dtype(entry.dtype)
    count = math.prod(entry.size)
    if not count:
        return torch.empty(entry.size, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.offset).view(entry.size)


def _laid_out(
    version: int, shards: Iterable[TensorShard], directory: Path | None, spare: SharedFile | None
) -> Snapshot:
    """A snapshot with room for some shards, in the spare file if that can be used, else in a new one."""
    token, label = secrets.token_hex(16), f"v{version}"
    entries, size = lay_out(shards, HEADER_BYTES)
    if spare is None or not spare.renew(label=label, token=token, size=size):
        if spare is not None:
            spare.close()
        spare = SharedFile(label=label, token=token, size=size, directory=directory)
    return Snapshot(version=version, token=token, entries=entries, file=spare)


class Base(Closing):
    """One copy of the weights in host memory, written over by each version as it arrives; used by one thread at a time.

    Changes are values, not differences: written over a copy that has some of them already they make the same. So a
    version may be made of a copy that it is being written into. Until all of it is loaded and attested, no other is:
    after an attempt that failed, for whatever reason, all of the next comes.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Hold nothing; the copy lies in `directory`, in shared memory if absent."""
        self._directory: Final = directory
        self._snapshot: Snapshot | None = None
        self._layout: EngineLayout = {}
        self.origin: Origin | None = None
        """The version that it holds, all of it and attested; None if there is none."""

    def holds(self, piece: TensorSlice, facts: TensorFacts) -> bool:
        """True if the copy has this slice of a tensor with this dtype and shape."""
        entry = None if self._snapshot is None else self._snapshot.finds(piece)
        return entry is not None and entry.facts == facts

    def read(self, piece: TensorSlice) -> memoryview:
        """Bytes of a slice that it holds, which the next write may change."""
        found = None if self._snapshot is None else self._snapshot.read(piece)
        assert found is not None, piece
        return found

    def begin(self, version: int, layout: EngineLayout) -> None:
        """Begin to receive a version; from here on the copy is of no version until `confirm`.

        Where there is no room for the layout, the log says so, nothing is kept, and the next version comes whole.
        """
        self.origin = None
        if self._snapshot is not None and layout == self._layout:
            return
        self.close()
        try:
            self._snapshot = blank_snapshot(version, layout, directory=self._directory)
        except WeightSyncError as error:
            _LOG.warning("of weights version %d no copy is kept, the next one comes whole: %s", version, error)
            return
        self._layout = layout

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Keep a slice that arrived."""
        if self._snapshot is not None:
            self._snapshot.write(piece, data)

    def confirm(self, version: int, digest: str) -> None:
        """Record that all of a version has been written, and that the weights loaded from it have this digest."""
        if self._snapshot is not None:
            self.origin = Origin(version=version, digest=digest)

    def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        self.origin = None
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.file.close()
