"""Folders for temporary files; those that killed processes left behind are removed when the next one is made.

A folder is locked (flock) for as long as its processes need it: one that nobody has locked is nobody's, however old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = "cosmos-scratch-"


@contextlib.contextmanager
def scratch(label: str, parent: str | None = None) -> Iterator[Path]:
    """An empty folder in `parent`, or that for temporary files, removed at the end; the label is for who looks in."""
    parent = parent or tempfile.gettempdir()
    _tidy(parent)
    owner = os.getpid()
    folder, lock = _locked(label, parent)
    try:
        yield folder
    finally:
        # A fork that drops what it inherits comes here too, and the folder is not its own.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def shared_scratch(name: str, parent: str) -> Iterator[Path]:
    """The folder of this name in `parent`, of all processes of a user that enter it; gone once the last has left."""
    _tidy(parent)
    folder = Path(parent) / f"{_PREFIX}{name}"
    lock = _entered(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        remove_abandoned(folder)


def _tidy(parent: str) -> None:
    for earlier in Path(parent).glob(f"{_PREFIX}*"):
        remove_abandoned(earlier)


def remove_abandoned(path: Path) -> bool:
    """Remove a file or folder of this user that no process has locked; returns whether it was."""
    with contextlib.suppress(OSError):
        # What is neither, such as a pipe, must not be waited for.
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(lock)
            # By now another may be there by its name, which somebody has entered.
            if found.st_uid == os.getuid() and os.path.samestat(found, os.lstat(path)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                return True
        finally:
            os.close(lock)
    return False


def _locked(label: str, parent: str) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{label}-", dir=parent))
        if (lock := _held(folder, fcntl.LOCK_EX)) is not None:
            return folder, lock


def _entered(folder: Path) -> int:
    """The descriptor of a lock that others may hold besides, of a folder that is made if it is not there."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if (lock := _held(folder, fcntl.LOCK_SH)) is not None:
            return lock


def _held(folder: Path, kind: int) -> int | None:
    """The descriptor of a folder's lock; None if somebody who took it for a dead process's has removed it before."""
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        undo.callback(os.close, lock)
        fcntl.flock(lock, kind)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            undo.pop_all()
            return lock
    return None
