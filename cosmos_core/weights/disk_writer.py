"""Writes a process's part of each version beside training, and removes versions that nobody needs any more."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import mmap
import posixpath
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import attrs
import msgspec
from fsspec.implementations.local import LocalFileSystem

from cosmos_core.errors import WeightSyncError
from cosmos_core.weights import wire
from cosmos_core.weights.disk_reader import (
    BLOCK_BYTES,
    FORMAT,
    StoredPart,
    access,
    checksum,
    run_folder,
    share_of,
    version_folder,
    version_of,
)
from cosmos_core.weights.shared_memory import map_shared

_LOG: Final = logging.getLogger(__name__)

_VANISHED: Final = (errno.ENOENT, errno.ESTALE)
"""What a file system answers to who writes into a folder that is removed meanwhile."""


_Snapshot: TypeAlias = tuple[wire.Manifest, mmap.mmap | None]
"""What is to be written; None in place of a file that is not there any more."""


class VersionWriter:
    """Writes to a folder that receivers can read (a path or fsspec URL), on a thread of its own.

    Where receivers have no other source (`is_only`), versions are written before they are announced, and a failure is
    raised. Else they are written beside, the newest only if writing cannot keep up, and a failure is logged. One
    process of a replica is enough that `removes` old versions.
    """

    def __init__(self, directory: str, run_id: str, *, is_only: bool, removes: bool) -> None:
        self._directory: Final = directory
        self._run_id: Final = run_id
        self._is_only: Final = is_only
        self._removes: Final = removes
        self._lock: Final = threading.Lock()
        self._waiting: _Snapshot | None = None
        self._oldest = 0
        """Versions before this one are not needed any more."""
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="stored-weights")

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
        """Whether writing a version failed because others removed it, having gone on to a newer one."""
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
                        with contextlib.suppress(FileNotFoundError):
                            files.rm(path, recursive=True)
        except WeightSyncError as error:
            _LOG.warning("old versions were not removed: %s", error)


def _versions(files: Any, root: str) -> list[tuple[int, str]]:
    """The versions in a run's folder, each with its own."""
    paths = files.ls(root, detail=False) if files.exists(root) else []
    found = [(version_of(posixpath.basename(path.rstrip("/"))), path) for path in paths]
    return [(version, path) for version, path in found if version is not None]


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
