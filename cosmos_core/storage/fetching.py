"""Folders of models, fetched from a store once for all processes of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from cosmos_core.errors import StorageError
from cosmos_core.storage.cache import cache_folder
from cosmos_core.storage.exporting import LIST, MARKS
from cosmos_core.storage.opening import told
from cosmos_core.storage.places import Place, opened


def fetch_model(url: str) -> Path:
    """A local copy of a model's folder in a store, fetched once for all processes of this machine.

    The copy is named by the names, sizes and tags of the files, so a model that was changed is fetched again.

    Raises:
        StorageError: There is no whole model, or the store fails.
    """
    with told(url):
        place = opened(url)
        listed = _of_model(place)
        if not any(name in listed for name in MARKS):
            said = f"{len(listed)} files, and neither {' nor '.join(MARKS)} among them" if listed else "nothing"
            raise StorageError(f"{url} is no whole model: it has {said}; was it sent to the end?")
        digest = hashlib.sha256(repr((url, sorted(listed.items()))).encode()).hexdigest()[:24]
        target = cache_folder() / "models" / digest
        with _alone(target):
            if not target.exists():
                _fetch(place, listed, target)
    return target


def _of_model(place: Place) -> dict[str, tuple[int, str]]:
    """What is listed, without the list of an export."""
    return {name: said for name, said in place.listed().items() if name != LIST}


def _fetch(place: Place, listed: Mapping[str, tuple[int, str]], target: Path) -> None:
    partial = target.with_name(f".partial-{secrets.token_hex(6)}")
    try:
        for name, (size, _) in listed.items():
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise StorageError(f"{place.where} has a file {name!r}, which would be outside of its folder")
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            place.get(name, path)
            if path.stat().st_size != size:
                raise OSError(
                    f"{name} has {path.stat().st_size:,} bytes, and {size:,} were listed; it is being changed"
                )
        if _of_model(place) != listed:
            raise OSError("it was changed while it was fetched; start again")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
