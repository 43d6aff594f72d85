"""Folders of models in a store: sent so that they are whole or no model at all, and fetched once for a machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import posixpath
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from cosmos_core.errors import StorageError
from cosmos_core.storage.cache import cache_folder
from cosmos_core.storage.opening import file_system, told

MARKS: Final = ("config.json", "model_index.json")
"""What makes a folder a model, for transformers and for diffusers: written last, removed first."""


def is_url(location: str) -> bool:
    """Whether a location is a URL, and no path."""
    return "://" in location


def send_folder(folder: Path, url: str) -> None:
    """Copy a model's folder to a store, in place of the model that is there.

    The file that makes it a model is removed first and written last: what was not sent whole is no model, and each
    file of a store of objects is there whole or not. The other files of an older model are removed at the end.

    Args:
        folder: Has one of `MARKS`.
        url: Of the folder in the store.

    Raises:
        StorageError: There is something else at the URL, the store fails, or what it then has is of another size.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    marks = [name for name in MARKS if name in files]
    if not marks:
        raise StorageError(f"{folder} is no model: it has neither {' nor '.join(MARKS)}")
    with told(url):
        store, root = _opened(url)
        before = _listed(store, root)
        if before and not any(name in before for name in (*MARKS, *files)):
            raise StorageError(f"{url} exists and is no exported model; choose another place")
        for name in MARKS:
            if name in before:
                store.rm_file(f"{root}/{name}")
        for name in [*(name for name in files if name not in marks), *marks]:
            # Stores of objects have no folders; others need them.
            store.makedirs(posixpath.dirname(f"{root}/{name}"), exist_ok=True)
            store.put_file(str(files[name]), f"{root}/{name}")
            _check_size(store, f"{root}/{name}", files[name].stat().st_size, url)
        for name in before.keys() - files.keys() - set(MARKS):
            store.rm_file(f"{root}/{name}")


def fetch_model(url: str) -> Path:
    """A local copy of a model's folder in a store, fetched once for all processes of this machine.

    The copy is named by the names, sizes and tags of the files, so a model that was changed is fetched again.

    Raises:
        StorageError: There is no whole model, or the store fails.
    """
    with told(url):
        store, root = _opened(url)
        listed = _listed(store, root)
        if not any(name in listed for name in MARKS):
            said = f"{len(listed)} files, and neither {' nor '.join(MARKS)} among them" if listed else "nothing"
            raise StorageError(f"{url} is no whole model: it has {said}; was it sent to the end?")
        digest = hashlib.sha256(repr((url, sorted(listed.items()))).encode()).hexdigest()[:24]
        target = cache_folder() / "models" / digest
        with _alone(target):
            if not target.exists():
                _fetch(store, root, listed, target)
    return target


def _fetch(store: Any, root: str, listed: Mapping[str, tuple[int, str]], target: Path) -> None:
    partial = target.with_name(f".partial-{secrets.token_hex(6)}")
    try:
        for name, (size, _) in listed.items():
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise StorageError(f"{root} has a file {name!r}, which would be outside of its folder")
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(f"{root}/{name}", str(path))
            if path.stat().st_size != size:
                raise OSError(
                    f"{name} has {path.stat().st_size:,} bytes, and {size:,} were listed; it is being changed"
                )
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _opened(url: str) -> tuple[Any, str]:
    store, root = file_system(url)
    store.invalidate_cache()
    return store, root.rstrip("/")


def _listed(store: Any, root: str) -> dict[str, tuple[int, str]]:
    """Size, and tag or time, of each file by its name below the folder; none if there is no folder."""
    found = store.find(root, detail=True)
    return {
        path.removeprefix(f"{root}/"): (int(said["size"]), str(said.get("ETag") or said.get("mtime") or ""))
        for path, said in found.items()
        if path.startswith(f"{root}/") and said["type"] == "file" and not path.endswith("/")
    }


def _check_size(store: Any, path: str, expected: int, url: str) -> None:
    store.invalidate_cache()
    found = store.info(path)["size"]
    if found != expected:
        raise StorageError(f"{url}: {posixpath.basename(path)} has {found:,} bytes there, and {expected:,} were sent")


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """While no other process of this machine makes the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
