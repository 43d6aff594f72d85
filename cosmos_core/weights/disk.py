"""Versions on a disk: written beside training, read slice by slice by ranges of bytes, each block checked.

A part that is damaged, gone, or of another run or version raises a `WeightSyncError` that names the file or URL.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import mmap
import posixpath
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

import attrs
import msgspec
import torch
from fsspec.implementations.local import LocalFileSystem

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.storage import file_system
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import digest, slices, wire
from cosmos_core.weights.fetch import Arrived, Ready, Wanted
from cosmos_core.weights.shards import TensorShard, torch_dtype
from cosmos_core.weights.shared_memory import map_shared

_LOG: Final = logging.getLogger(__name__)
FORMAT: Final = 1
BLOCK_BYTES: Final = 1 << 20
"""Unit of checksums, hence of reading."""

_VERSION: Final = re.compile(r"v(\d+)-\w+")


@attrs.frozen(kw_only=True)
class StoredPart:
    """Describes a stored part: the file that one process wrote of a version.

    Attributes:
        format: `FORMAT` of the release that wrote it.
        run_id: The run that the weights belong to.
        manifest: The tensors in the part; `path` is the name of the file with the bytes.
        block_bytes: Size of the blocks of that file, the last of which may be shorter.
        checksums: CRC-32 of each block.
    """

    format: int
    run_id: str
    manifest: wire.Manifest
    block_bytes: int
    checksums: tuple[int, ...]


def version_folder(directory: str, run_id: str, version: int, digest: str) -> str:
    """The folder with the parts of a version."""
    return f"{run_folder(directory, run_id)}/v{version}-{digest}"


def run_folder(directory: str, run_id: str) -> str:
    """The folder with all versions of a run."""
    return f"{directory.rstrip('/')}/{run_id}"


def share_of(manifest: wire.Manifest) -> str:
    """A name for what a part holds: equal for parts of the same tensors, slices and dtypes."""
    held = [attrs.evolve(entry, offset=0) for entry in manifest.entries]
    return hashlib.sha256(msgspec.json.encode(held)).hexdigest()[:16]


def checksum(block: bytes | memoryview) -> int:
    """CRC-32 of a block."""
    return zlib.crc32(block)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise whatever fails in the body as a WeightSyncError that names the path or URL."""
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        # Libraries of file systems raise errors of their own: botocore's, for one, are no OSError.
        reason = str(error).strip().partition("\n")[0]
        kind = "" if reason and isinstance(error, OSError) else f"{type(error).__name__}: "
        raise WeightSyncError(f"{what}: {kind}{reason}".removesuffix(": ")) from error


@contextmanager
def access(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and the path in it."""
    with told(f"weights at {url}"):
        files, root = file_system(url)
        files.invalidate_cache()
        yield files, root.rstrip("/")


_ALIGNMENT: Final = 64
_READ_BYTES: Final = 32 << 20
"""Most bytes to read at once, unless a single slice has more."""


def stored_parts(directory: str, run_id: str, target: WeightTarget) -> tuple[list[Ready], list[str]]:
    """The run's parts of a version that are there, and what is wrong with those that cannot be used."""
    url = version_folder(directory, run_id, target.version, target.digest)
    ready: list[Ready] = []
    problems: list[str] = []
    with access(url) as (files, folder):
        paths = sorted(files.ls(folder, detail=False)) if files.exists(folder) else []
        for path in paths:
            if not path.endswith(".json"):
                continue
            try:
                part = _described(files, path, run_id, target)
            except WeightSyncError as error:
                problems.append(str(error))
                continue
            stored, manifest = StoredFile(files, posixpath.join(folder, part.manifest.path), part), part.manifest
            ready.append(Ready(source=None, manifest=manifest, shards=manifest.shard_map(), read=stored.read))
    if not ready and not problems:
        problems.append(f"{url}: nothing is stored there")
    return ready, problems


def _described(files: Any, path: str, run_id: str, target: WeightTarget) -> StoredPart:
    """The description of a part that can be used."""
    try:
        part = msgspec.json.decode(files.cat_file(path), type=StoredPart)
    except msgspec.MsgspecError as error:
        raise WeightSyncError(f"{path}: the description is damaged: {error}") from error
    manifest = part.manifest
    if part.format != FORMAT:
        raise WeightSyncError(f"{path}: format {part.format}, and this release reads {FORMAT}; run one release")
    if part.run_id != run_id:
        raise WeightSyncError(f"{path}: it is of the run {part.run_id!r}, not {run_id!r}")
    if (manifest.version, manifest.digest) != (target.version, target.digest):
        raise WeightSyncError(
            f"{path}: it is of version {manifest.version} with the digest {manifest.digest}, not of version "
            f"{target.version} with {target.digest}"
        )
    try:
        is_consistent = digest.combine(manifest.digests) == target.digest and _is_sound(part)
    except ValueError as error:
        raise WeightSyncError(f"{path}: the description is damaged: {error}") from error
    if not is_consistent:
        raise WeightSyncError(f"{path}: the description is damaged: it contradicts itself")
    content = posixpath.join(posixpath.dirname(path), manifest.path)
    size = files.size(content) if files.exists(content) else None
    if size != manifest.file_bytes or len(part.checksums) != -(-manifest.file_bytes // part.block_bytes):
        found = "is not there" if size is None else f"has {size:,} bytes"
        raise WeightSyncError(
            f"{content} {found}, and {manifest.file_bytes:,} were written: it is truncated or foreign"
        )
    return part


def _is_sound(part: StoredPart) -> bool:
    """True if the slices described can lie in the file."""
    manifest = part.manifest
    if part.block_bytes < 1 or part.block_bytes % _ALIGNMENT or posixpath.basename(manifest.path) != manifest.path:
        return False
    return all(
        0 <= entry.offset <= manifest.file_bytes - entry.nbytes and not entry.offset % _ALIGNMENT
        for entry in manifest.entries
    )


@attrs.frozen(kw_only=True)
class _Range:
    """The bytes of a slice in the file, from its first to its last element."""

    rank: int
    piece: TensorSlice
    entry: TensorShard
    first: int
    last: int


class StoredFile:
    """Reads slices of a stored part.

    For each slice it reads the span from the first to the last element, in whole blocks; slices that are near each
    other are read at once.
    """

    def __init__(self, files: Any, path: str, part: StoredPart) -> None:
        self._files: Final = files
        self._path: Final = path
        self._part: Final = part
        self._entries: Final[dict[str, list[TensorShard]]] = {}
        for entry in part.manifest.entries:
            self._entries.setdefault(entry.name, []).append(entry)

    def read(self, pieces: Sequence[Wanted]) -> Iterator[Arrived]:
        """Yield slices in the order in which they lie in the file."""
        ranges = [self._range(rank, chunk) for rank, piece in pieces for chunk in self._chunks(piece)]
        for run in _runs(sorted(ranges, key=lambda each: (each.first, each.last)), self._part.block_bytes):
            first = run[0].first // self._part.block_bytes * self._part.block_bytes
            data = self._checked(first, max(each.last for each in run))
            yield from ((each.rank, each.piece, _cut(data, first, each)) for each in run)

    def _chunks(self, piece: TensorSlice) -> list[TensorSlice]:
        """Slices of bounded size."""
        itemsize = self._entries[piece.name][0].facts.itemsize
        return slices.chunks(piece, _READ_BYTES // itemsize) if slices.size(piece) else [piece]

    def _range(self, rank: int, piece: TensorSlice) -> _Range:
        entry = next(each for each in self._entries[piece.name] if slices.contains(each.piece, piece))
        itemsize, strides = entry.facts.itemsize, _strides(entry.size)
        places = list(zip(piece.start, entry.start, piece.shape, strides, strict=True))
        first = entry.offset + itemsize * sum((start - base) * stride for start, base, _, stride in places)
        span = 1 + sum((count - 1) * stride for _, _, count, stride in places) if slices.size(piece) else 0
        return _Range(rank=rank, piece=piece, entry=entry, first=first, last=first + itemsize * span)

    def _checked(self, first: int, last: int) -> bytearray:
        """Whole blocks from the one that begins at `first` to the one that `last` lies in."""
        block_bytes = self._part.block_bytes
        end = min(-(-last // block_bytes) * block_bytes, self._part.manifest.file_bytes)
        with told(self._path):
            data = bytearray(self._files.cat_file(self._path, start=first, end=end))
        view = memoryview(data)
        for place in range(0, end - first, block_bytes):
            begin = first + place
            if checksum(view[place : place + block_bytes]) != self._part.checksums[begin // block_bytes]:
                raise WeightSyncError(
                    f"{self._path}: bytes {begin:,} to {min(begin + block_bytes, end):,} are not what was written "
                    "(CRC-32): the file is damaged; remove its folder, the next version is stored anew"
                )
        return data


def _runs(ranges: Sequence[_Range], gap: int) -> Iterator[list[_Range]]:
    """Ranges to be read at once: near each other, and of bounded size."""
    run: list[_Range] = []
    end = 0
    for each in ranges:
        if run and (each.first - end > gap or max(end, each.last) - run[0].first > _READ_BYTES):
            yield run
            run = []
        end = max(end, each.last) if run else each.last
        run.append(each)
    if run:
        yield run


def _cut(data: bytearray, first: int, each: _Range) -> torch.Tensor:
    dtype = torch_dtype(each.entry.dtype)
    count = (each.last - each.first) // dtype.itemsize
    if not count:
        return torch.empty(each.piece.shape, dtype=dtype)
    # Blocks and entries begin where any dtype may.
    span = torch.frombuffer(data, dtype=dtype, count=count, offset=each.first - first)
    return span.as_strided(each.piece.shape, _strides(each.entry.size))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie one after another."""
    return torch.empty(shape, device="meta").stride()


_VANISHED: Final = (errno.ENOENT, errno.ESTALE)
"""What a file system answers to who writes into a folder that is removed meanwhile."""


_Snapshot: TypeAlias = tuple[wire.Manifest, mmap.mmap | None]
"""What is to be written; None in place of a file that is not there any more."""


@attrs.define(eq=False)
class VersionWriter:
    """Writes to a folder that receivers can read (a path or fsspec URL), on a thread of its own.

    Where receivers have no other source (`is_only`), versions are written before they are announced, and a failure is
    raised. Else they are written beside, the newest only if writing cannot keep up, and a failure is logged. One
    process of a replica is enough that `removes` old versions.
    """

    _directory: str
    _run_id: str
    _is_only: bool = attrs.field(kw_only=True)
    _removes: bool = attrs.field(kw_only=True)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _waiting: _Snapshot | None = attrs.field(default=None, init=False)
    _oldest: int = attrs.field(default=0, init=False)
    """Versions before this one are not needed any more."""
    _thread: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "stored-weights"), init=False)

    def put(self, manifest: wire.Manifest) -> None:
        """Write what a snapshot of this process holds, or have it written."""
        # Who maps the file keeps it from being written over.
        snapshot = manifest, map_shared(manifest.path, token=manifest.token, size=manifest.file_bytes)
        if self._is_only:
            self._thread.submit(self._write, *snapshot).result()
            return
        with self._lock:
            # One waits at most: each keeps a whole snapshot in memory.
            late, self._waiting = self._waiting, snapshot
        if late is not None:
            _LOG.info("weights version %d was not stored: writing cannot keep up", late[0].version)
        self._begin(self._write_waiting)

    def remove_before(self, oldest: int) -> None:
        """Have versions before `oldest` removed, complete or not; returns at once."""
        with self._lock:
            if oldest <= self._oldest:
                return
            self._oldest = oldest
        if self._removes:
            self._begin(functools.partial(self._remove_before, oldest))

    def close(self) -> None:
        """Wait until what is under way is written. Idempotent."""
        self._thread.shutdown(wait=True)

    def _begin(self, work: Callable[[], None]) -> None:
        """Have something done that nobody waits for."""
        self._thread.submit(work).add_done_callback(_tell)

    def _write_waiting(self) -> None:
        with self._lock:
            snapshot, self._waiting = self._waiting, None
        if snapshot is None:
            return
        try:
            self._write(*snapshot)
        except WeightSyncError as error:
            _LOG.warning("weights version %d was not stored, training goes on: %s", snapshot[0].version, error)

    def _write(self, manifest: wire.Manifest, mapped: mmap.mmap | None) -> None:
        """Store a snapshot; it is an error if it cannot be stored, and is needed still."""
        try:
            self._store(manifest, mapped)
        except WeightSyncError as error:
            # Another replica, which was faster, removes a version while this one writes it.
            if not (manifest.version < self._oldest or self._is_removed(manifest, error)):
                raise
            _LOG.info("weights version %d was not stored, as nobody needs it any more: %s", manifest.version, error)

    def _is_removed(self, manifest: wire.Manifest, error: WeightSyncError) -> bool:
        """True if writing a version failed because other processes, at a newer one already, removed it."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _VANISHED:
            return False
        try:
            with access(run_folder(self._directory, self._run_id)) as (files, root):
                versions = [version for version, _ in _versions(files, root)]
        except WeightSyncError:
            return False
        return manifest.version not in versions and max(versions, default=-1) > manifest.version

    def _store(self, manifest: wire.Manifest, mapped: mmap.mmap | None) -> None:
        if mapped is None:
            raise WeightSyncError(f"the snapshot of version {manifest.version} at {manifest.path} is gone")
        url = version_folder(self._directory, self._run_id, manifest.version, manifest.digest)
        with access(url) as (files, folder):
            description = f"{folder}/{share_of(manifest)}.json"
            if files.exists(description):
                # Another replica has written the same.
                return
            files.makedirs(folder, exist_ok=True)
            name = f"{manifest.token}.bin"
            checksums = []
            with files.open(f"{folder}/{name}", "wb") as file, memoryview(mapped) as whole:
                for first in range(0, len(whole), BLOCK_BYTES):
                    with whole[first : first + BLOCK_BYTES] as block:
                        file.write(block)
                        checksums.append(checksum(block))
            part = StoredPart(
                format=FORMAT,
                run_id=self._run_id,
                manifest=attrs.evolve(manifest, path=name),
                block_bytes=BLOCK_BYTES,
                checksums=tuple(checksums),
            )
            _write_at_once(files, description, msgspec.json.encode(part))

    def _remove_before(self, oldest: int) -> None:
        url = run_folder(self._directory, self._run_id)
        try:
            with access(url) as (files, root):
                for version, path in _versions(files, root):
                    if version < oldest:
                        # Other replicas remove the same.
                        with suppress(FileNotFoundError):
                            files.rm(path, recursive=True)
        except WeightSyncError as error:
            _LOG.warning("old versions were not removed: %s", error)


def _versions(files: Any, root: str) -> list[tuple[int, str]]:
    """The versions in a run's folder, each with its own."""
    paths = files.ls(root, detail=False) if files.exists(root) else []
    found = [(_VERSION.fullmatch(posixpath.basename(path.rstrip("/"))), path) for path in paths]
    return [(int(match[1]), path) for match, path in found if match is not None]


def _tell(done: Future[None]) -> None:
    """Log why something that nobody waits for failed."""
    error = done.exception()
    if error is not None:
        _LOG.error("weights are not stored as they should be, training goes on: %r", error, exc_info=error)


def _write_at_once(files: Any, path: str, content: bytes) -> None:
    """Write a file so that nobody sees a part of it; stores of objects do so by themselves."""
    if not isinstance(files, LocalFileSystem):
        files.pipe_file(path, content)
        return
    files.pipe_file(f"{path}.partial", content)
    files.mv(f"{path}.partial", path)
