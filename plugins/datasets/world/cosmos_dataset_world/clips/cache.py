"""Local copies of what is elsewhere, made once for all processes of a machine; the oldest make room for new ones."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cosmos_core.errors import StorageError

IN_USE_S: Final = 900.0
"""Files that were handed out within so many seconds are never removed."""

_ABANDONED_S: Final = 86400.0
"""Files that are half written for so long, nobody writes any more."""

_LOCK: Final = ".lock"
_PARTIAL: Final = ".partial-"


class LocalCache:
    """Files of a folder, by name. Several threads and processes may use one folder at once.

    Args:
        folder: Made when it is first needed.
        max_bytes: Of all files together. What is in use (`IN_USE_S`) stays even if it alone is more.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder: Final = folder
        self._max_bytes: Final = max_bytes
        self._lock: Final = threading.Lock()
        self._unseen: int | None = None
        """Bytes written since the folder was last looked through; None before the first time."""

    def get(self, name: str, make: Callable[[Path], None]) -> Path:
        """The path of a file, made if it is not there: under another name, then renamed, so it is there whole or not.

        Args:
            name: A file name, which stands for the content: what is there is never made again.
            make: Writes the file.

        Raises:
            StorageError: The folder cannot be written.
        """
        path = self._folder / name
        with self._told():
            if self._touch(path):
                return path
            self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{_PARTIAL}{secrets.token_hex(6)}-{name}"
        try:
            make(partial)
            with self._told():
                size = partial.stat().st_size
                partial.rename(path)
                self._make_room(size)
        finally:
            partial.unlink(missing_ok=True)
        return path

    def _touch(self, path: Path) -> bool:
        """Mark a file as in use; whether it is there."""
        try:
            with self._locked(fcntl.LOCK_SH):
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._unseen = None if self._unseen is None else self._unseen + size
            if self._unseen is not None and self._unseen < self._max_bytes // 16:
                return
            self._unseen = 0
            with self._locked(fcntl.LOCK_EX):
                self._evict()

    def _evict(self) -> None:
        now = time.time()
        found = sorted(self._files(), key=lambda each: each[0].st_mtime)
        # Room for what may come until the next look.
        excess = sum(stat.st_size for stat, _ in found) - (self._max_bytes - self._max_bytes // 16)
        for stat, path in found:
            age = now - stat.st_mtime
            if excess <= 0 or age < IN_USE_S:
                return
            if path.name.startswith(_PARTIAL) and age < _ABANDONED_S:
                continue
            with suppress(FileNotFoundError):
                path.unlink()
                excess -= stat.st_size

    def _files(self) -> Iterator[tuple[os.stat_result, Path]]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # What others have half written is renamed meanwhile.
                with suppress(FileNotFoundError):
                    if entry.name != _LOCK:
                        yield entry.stat(), Path(entry.path)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """While others do not remove files, or do not touch them."""
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the cache {self._folder} cannot be used: {error}; set COSMOS_CACHE to a folder that can be written"
            ) from error
