"""Folders of this machine, where a name may be a link to what belongs to others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from cosmos_core.errors import StorageError


def files_of(root: Path) -> dict[str, tuple[int, str]]:
    """Size and time of each file by its name below a folder, of links those of what they lead to.

    A link is a file, whatever it leads to; below a link to a folder nothing is listed.
    """
    return {
        path.relative_to(root).as_posix(): _size_and_time(path)
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def check_folder(target: Path) -> None:
    """Refuse a place that is no folder and cannot be made one.

    Raises:
        StorageError: It, or what it would be made in, is a file or a link to what is not there.
    """
    for path in (target, *target.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise StorageError(f"{path} is a link to what is not there; remove it, or choose another place")
        if path.is_dir():
            return
        if path.exists():
            why = "exists and is no folder" if path is target else "is no folder, so nothing can be made in it"
            raise StorageError(f"{path} {why}; choose another place")


def check_ways(root: Path, names: Iterable[str]) -> None:
    """Refuse to write files where something else than a file, or a folder of `root` itself, is in the way.

    Args:
        root: A folder.
        names: The files to write below it.

    Raises:
        StorageError: There is a link or a file where a folder is wanted, or a folder where a file is.
    """
    choice = "remove it, or choose another place"
    for name in names:
        for folder in reversed(PurePosixPath(name).parents[:-1]):
            path = root / folder
            if path.is_dir() and path.is_symlink():
                raise StorageError(f"{path} is a link to another folder; {choice}")
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise StorageError(f"{path} is no folder, and the model has one there; {choice}")
        path = root / name
        if path.is_dir() and not path.is_symlink():
            raise StorageError(f"{path} is a folder, and the model has a file there; {choice}")


def unlink_link(path: Path) -> None:
    """Remove a link, so that what is written there does not go where it leads."""
    if path.is_symlink():
        path.unlink()


def _size_and_time(path: Path) -> tuple[int, str]:
    found = path.stat() if path.exists() else os.lstat(path)
    return found.st_size, str(found.st_mtime)
