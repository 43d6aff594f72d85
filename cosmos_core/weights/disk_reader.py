"""Reads slices of stored versions by ranges of bytes, each block checked.

What is damaged, gone, or of another run or version is a `WeightSyncError` that names the file or URL.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import msgspec
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.storage import file_system
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import digest, slices, wire
from cosmos_core.weights.fetch import Ready
from cosmos_core.weights.shards import TensorShard, torch_dtype
from cosmos_core.weights.source import Arrived, Wanted

FORMAT: Final = 1
BLOCK_BYTES: Final = 1 << 20
"""Unit of checksums, hence of reading."""

_VERSION: Final = re.compile(r"v(\d+)-\w+")


@attrs.frozen(kw_only=True)
class StoredPart:
    """Description of a part.

    Attributes:
        format: `FORMAT` of the release that wrote it.
        run_id: Whose weights they are.
        manifest: What it holds; `path` is the name of the file with the bytes.
        block_bytes: Size of the blocks of that file, the last of which may be shorter.
        checksums: CRC-32 of each block.
    """

    format: int
    run_id: str
    manifest: wire.Manifest
    block_bytes: int
    checksums: tuple[int, ...]


def version_folder(directory: str, run_id: str, version: int, digest: str) -> str:
    """Where the parts of a version are."""
    return f"{run_folder(directory, run_id)}/v{version}-{digest}"


def run_folder(directory: str, run_id: str) -> str:
    """Where a run's versions are."""
    return f"{directory.rstrip('/')}/{run_id}"


def version_of(name: str) -> int | None:
    """The version of a folder's name; None if it is none of ours."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match else None


def share_of(manifest: wire.Manifest) -> str:
    """A name for what a part holds: equal for parts of the same tensors, slices and dtypes."""
    held = [attrs.evolve(entry, offset=0) for entry in manifest.entries]
    return hashlib.sha256(msgspec.json.encode(held)).hexdigest()[:16]


def checksum(block: bytes | memoryview) -> int:
    """CRC-32 of a block."""
    return zlib.crc32(block)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Name a path or URL with which a body fails."""
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
    """Whether what is described can lie in the file."""
    manifest = part.manifest
    if part.block_bytes < 1 or part.block_bytes % _ALIGNMENT or posixpath.basename(manifest.path) != manifest.path:
        return False
    return all(
        0 <= entry.offset <= manifest.file_bytes - entry.nbytes and not entry.offset % _ALIGNMENT
        for entry in manifest.entries
    )


@attrs.frozen(kw_only=True)
class _Range:
    """Where a slice lies in the file: from its first to its last element."""

    rank: int
    piece: TensorSlice
    entry: TensorShard
    first: int
    last: int


class StoredFile:
    """A stored part.

    What is read is the span from the first to the last element of each slice, in whole blocks; slices that are near
    each other are read at once.
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
    """Of a tensor whose elements lie one after another."""
    return torch.empty(shape, device="meta").stride()
