"""A folder of a store, or of this machine: its files, each by its name below the folder."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Final

from fsspec.implementations.local import LocalFileSystem

from cosmos_core.errors import StorageError
from cosmos_core.storage.opening import file_system

_TAGS: Final = ("ETag", "etag", "mtime", "created")
"""By which file systems tell one content of a file from another."""


class Place:
    """A folder of a store, there or not.

    Its methods raise what fsspec's file systems do; `opening.told` makes StorageErrors of that.

    Attributes:
        where: The folder as people name it.
    """

    def __init__(self, store: Any, root: str, where: str) -> None:
        self.where: Final = where
        self._store = store
        self._root: Final = root

    def check(self) -> None:
        """Refuse a place that is no folder and cannot be made one: in a store of objects there is none."""

    def listed(self) -> dict[str, tuple[int, str]]:
        """Size, and tag or time, of each file; none if there is no folder."""
        self._store.invalidate_cache()
        return {
            path.removeprefix(f"{self._root}/"): (
                int(said["size"]),
                next((str(said[tag]) for tag in _TAGS if said.get(tag)), ""),
            )
            for path, said in self._store.find(self._root, detail=True).items()
            if path.startswith(f"{self._root}/") and said["type"] == "file" and not path.endswith("/")
        }

    def check_ways(self, names: Iterable[str]) -> None:
        """Refuse to write files that something else than a file is in the way of: in a store of objects nothing is."""

    def read(self, name: str) -> bytes:
        """What a file has in it."""
        content: bytes = self._store.cat_file(self._path(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make a file, or replace it."""
        self._store.pipe_file(self._way(name), content)

    def put(self, name: str, file: Path) -> None:
        """Copy a file of this machine.

        Raises:
            StorageError: What is then there is of another size.
        """
        path, sent = self._way(name), file.stat().st_size
        self._store.put_file(str(file), path)
        self._store.invalidate_cache()
        found = self._store.info(path)["size"]
        if found != sent:
            raise StorageError(f"{self.where}: {name} has {found:,} bytes there, and {sent:,} were sent")

    def get(self, name: str, file: Path) -> None:
        """Copy a file to this machine."""
        self._store.get_file(self._path(name), str(file))

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._store.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _way(self, name: str) -> str:
        """The path of a file that can be written there: stores of objects have no folders, others need them."""
        path = self._path(name)
        self._store.makedirs(posixpath.dirname(path), exist_ok=True)
        return path


class LocalPlace(Place):
    """A folder of this machine, where a name may be a link to what belongs to others: nothing is written through it."""

    def __init__(self, root: Path, where: str) -> None:
        self._folder: Final = root.absolute()
        super().__init__(LocalFileSystem(), str(self._folder), where)

    def check(self) -> None:
        """Refuse a place that is no folder and cannot be made one.

        Raises:
            StorageError: It, or what it would be made in, is a file or a link to what is not there.
        """
        for path in (self._folder, *self._folder.parents):
            if path.is_symlink() and not path.exists():
                raise StorageError(f"{path} is a link to what is not there; remove it, or choose another place")
            if path.is_dir():
                return
            if path.exists():
                is_place = path == self._folder
                why = "exists and is no folder" if is_place else "is no folder, so nothing can be made in it"
                raise StorageError(f"{path} {why}; choose another place")

    def listed(self) -> dict[str, tuple[int, str]]:
        """Size and time of each file, of links those of what they lead to.

        A link is a file, whatever it leads to; below a link to a folder nothing is listed.
        """
        return {
            path.relative_to(self._folder).as_posix(): _size_and_time(path)
            for path in sorted(self._folder.rglob("*"))
            if path.is_symlink() or path.is_file()
        }

    def check_ways(self, names: Iterable[str]) -> None:
        """Refuse to write files where something else than a file, or a folder of this place itself, is in the way.

        Raises:
            StorageError: There is a link or a file where a folder is wanted, or a folder where a file is.
        """
        choice = "remove it, or choose another place"
        for name in names:
            for folder in reversed(PurePosixPath(name).parents[:-1]):
                path = self._folder / folder
                if path.is_dir() and path.is_symlink():
                    raise StorageError(f"{path} is a link to another folder; {choice}")
                if path.is_symlink() or (path.exists() and not path.is_dir()):
                    raise StorageError(f"{path} is no folder, and the model has one there; {choice}")
            path = self._folder / name
            if path.is_dir() and not path.is_symlink():
                raise StorageError(f"{path} is a folder, and the model has a file there; {choice}")

    def get(self, name: str, file: Path) -> None:
        """Copy a file of this machine.

        Raises:
            StorageError: It is a link to a folder.
        """
        path = self._folder / name
        if path.is_dir():
            raise StorageError(f"{path} is a link to a folder, of which nothing is copied; put the folder itself there")
        super().get(name, file)

    def move(self, name: str, file: Path) -> None:
        """Move a file of the same file system there."""
        file.replace(Path(self._way(name)))

    def _way(self, name: str) -> str:
        path = super()._way(name)
        if Path(path).is_symlink():
            Path(path).unlink()
        return path


def opened(url: str) -> Place:
    """The folder at a URL.

    Raises:
        StorageError: Half of the credentials are set (`opening.file_system`, which raises other errors, too).
    """
    store, root = file_system(url)
    root = root.rstrip("/")
    return LocalPlace(Path(root or "/"), url) if isinstance(store, LocalFileSystem) else Place(store, root, url)


def _size_and_time(path: Path) -> tuple[int, str]:
    found = path.stat() if path.exists() else os.lstat(path)
    return found.st_size, str(found.st_mtime)
