"""One shared-memory file per snapshot: written once, mapped by receivers on the same host, unlinked when dropped.

A file is locked (flock) for as long as its process lives, so that what a killed process left behind can be told from
what is in use, whatever the process ids say. Who maps it holds a lock of another kind (OFD, on its first byte) for as
long as the mapping lives: a file that nobody maps any more can hold another snapshot, and its pages need not be made
anew.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import mmap
import os
import re
import struct
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil

from cosmos_core.errors import WeightSyncError
from cosmos_core.scratch import remove_abandoned

_LOG: Final = logging.getLogger(__name__)

HEADER_BYTES: Final = 64
"""Magic and token; the data begins behind it, aligned for any dtype."""

_MAGIC: Final = b"COSMOSW1"
_PREFIX: Final = "cosmos-weights-"
_READER: Final = fcntl.F_RDLCK
_WRITER: Final = fcntl.F_WRLCK
_NOBODY: Final = fcntl.F_UNLCK
_NO_LOCKS: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS}
"""What file systems and kernels without such locks answer."""
_Locked: TypeAlias = Literal["held", "refused", "unknown"]
_NAME: Final = re.compile(re.escape(_PREFIX) + r"(?P<pid>\d+)-")


class SharedFile:
    """A file of this process that others may map; `close` unlinks it, and what is mapped stays readable."""

    def __init__(self, *, label: str, token: str, size: int, directory: Path | None = None) -> None:
        """Create the file and map it, its pages present.

        The label is for people who look at the folder (shared memory if absent; the folder for temporary files where
        that is full), the token distinguishes it from any other file, and `size` includes the header.
        """
        name = f"{_PREFIX}{os.getpid()}-{label}-{token}"
        directories = directories_for_files() if directory is None else (directory,)
        path, fd, buffer = _allocate(directories, name, size)
        self.path = path
        self.buffer: Final = buffer
        self.buffer[:HEADER_BYTES] = _header(token)
        self.size: Final = size
        self._fd: Final = fd
        self._lent: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None
        self._finalizer = weakref.finalize(self, _discard, path, fd, os.getpid())

    def lend(self) -> memoryview:
        """The content, which stays as it is for as long as this or any part of it is held; for one thread."""
        if (held := self._lent()) is None:
            held = np.frombuffer(self.buffer, dtype=np.uint8)
            self._lent = weakref.ref(held)
            # Holds the file until then: when it goes, its memory is not page-locked any more.
            weakref.finalize(held, id, self)
        return held.data

    def renew(self, *, label: str, token: str, size: int) -> bool:
        """Make this the file of another snapshot, to be written over; returns whether that was possible.

        It is not if the file has another size, if parts of it are lent, if somebody maps it or unlinked it, or if it
        cannot be known whether somebody maps it.
        """
        is_free = self._lent() is None and self._finalizer.alive
        if size != self.size or not is_free or _lock(self._fd, _WRITER) != "held":
            return False
        # Whoever has opened it under its old name, and not mapped it yet, will find another token in it.
        path = self.path.with_name(f"{_PREFIX}{os.getpid()}-{label}-{token}")
        try:
            self.path.rename(path)
        except OSError as error:
            _LOG.warning("the file %s cannot be used again, another is made: %s", self.path, error.strerror)
            _lock(self._fd, _NOBODY)
            return False
        self._finalizer.detach()
        self.path = path
        self._finalizer = weakref.finalize(self, _discard, path, self._fd, os.getpid())
        self.buffer[:HEADER_BYTES] = _header(token)
        _lock(self._fd, _NOBODY)
        return True

    def close(self) -> None:
        """Unlink the file; its memory is freed when the last mapping goes. Idempotent."""
        self._finalizer()


def map_shared(path: str, *, token: str, size: int) -> mmap.mmap | None:
    """Map a file of another process on this host; None if it is not there (any more) or not the one meant.

    The mapping is private: writing to it would change neither the file nor what others see.
    """
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            # The mapping has a descriptor of its own of the same opening, which keeps the lock.
            if _lock(file.fileno(), _READER) == "refused":
                return None
    except OSError:
        return None
    return mapped if mapped[:HEADER_BYTES] == _header(token) else None


def directories_for_files() -> tuple[Path, ...]:
    """The folders in which snapshots may lie, best first."""
    shared = Path("/dev/shm")  # noqa: S108 - shared memory: names are unguessable, created exclusively, mode 600
    usual = Path(tempfile.gettempdir())
    return (shared, usual) if os.access(shared, os.W_OK) else (usual,)


def sweep(directory: Path) -> list[Path]:
    """Unlink the files that dead processes of this user left in a folder, and return them."""
    named = [(path, _NAME.match(path.name)) for path in directory.glob(f"{_PREFIX}*")]
    dead = [path for path, match in named if match and not psutil.pid_exists(int(match["pid"]))]
    return [path for path in dead if remove_abandoned(path)]


def _lock(fd: int, kind: int) -> _Locked:
    """Lock a file's first byte for one opening of it, or unlock it.

    Where there are no such locks, files are mapped without, and none is written over.
    """
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        _tell_no_locks("this system has no F_OFD_SETLK")
        return "unknown"
    try:
        # struct flock of 64-bit Linux: type, whence, start, length, process (none: the lock is the opening's).
        fcntl.fcntl(fd, command, struct.pack("@hhqqi4x", kind, os.SEEK_SET, 0, 1, 0))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            _tell_no_locks(str(error.strerror))
            return "unknown"
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            _LOG.warning("a file of a weight snapshot could not be locked: %s", error.strerror)
        return "refused"
    return "held"


@functools.cache
def _tell_no_locks(reason: str) -> None:
    _LOG.warning("files of weight snapshots cannot be locked (%s): each version takes a new one", reason)


def _header(token: str) -> bytes:
    return (_MAGIC + token.encode()).ljust(HEADER_BYTES, b"\0")


def _allocate(directories: tuple[Path, ...], name: str, size: int) -> tuple[Path, int, mmap.mmap]:
    problems = []
    for directory in directories:
        path = directory / name
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Reserves the space: without it a full file system kills the process with SIGBUS at a later write.
            os.posix_fallocate(fd, 0, size)
            # Populating at once is several times cheaper than one page fault after another.
            buffer = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
            if fd >= 0:
                _discard(path, fd, os.getpid())
        else:
            if problems:
                _LOG.warning("weight snapshots lie in %s, which may be slow (%s)", directory, "; ".join(problems))
            return path, fd, buffer
    raise WeightSyncError(
        f"no room for a weight snapshot of {size:,} bytes ({'; '.join(problems)}); "
        "free space there, or enlarge the shared memory (docker: --shm-size)"
    )


def _discard(path: Path, fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the finalizer, but not the file
        path.unlink(missing_ok=True)
    os.close(fd)
