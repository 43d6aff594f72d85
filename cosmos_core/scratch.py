"""Folders for temporary files; those that killed processes left behind are removed when the next one is made.

A folder is locked (flock) for as long as its process needs it: one that nobody has locked is nobody's, however old.
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
    for earlier in Path(parent).glob(f"{_PREFIX}*"):
        remove_abandoned(earlier)
    owner = os.getpid()
    folder, lock = _locked(label, parent)
    try:
        yield folder
    finally:
        # A fork that drops what it inherits comes here too, and the folder is not its own.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def remove_abandoned(path: Path) -> bool:
    """Remove a file or folder of this user that no process has locked; returns whether it was."""
    with contextlib.suppress(OSError):
        # What is neither, such as a pipe, must not be waited for.
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                return True
        finally:
            os.close(lock)
    return False


def _locked(label: str, parent: str) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{label}-", dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Before it was locked, somebody may have taken it for a dead process's.
        if folder.exists():
            return folder, lock
        os.close(lock)
