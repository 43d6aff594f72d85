"""Folders of models in a store: sent so that they are whole or no model at all, and fetched once for a machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import posixpath
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from cosmos_core.errors import StorageError
from cosmos_core.storage.cache import cache_folder
from cosmos_core.storage.opening import file_system, told

MARKS: Final = ("config.json", "model_index.json")
"""What makes a folder a model, for transformers and for diffusers: written last, removed first."""


LIST: Final = ".cosmos-export"
"""Beside an export in a store: the names of its files, a line each. Written first, so that it is also there of an
export that was cut off; no other file is ever removed, but for those that the index of a model's weights names."""

_INDEX: Final = ".safetensors.index.json"
_WEIGHTS: Final = ".safetensors"
_TAGS: Final = ("ETag", "etag", "mtime", "created")
"""By which file systems tell one content of a file from another."""


def is_url(location: str) -> bool:
    """Whether a location is a URL, and no path."""
    return "://" in location


def send_folder(folder: Path, url: str) -> None:
    """Copy a model's folder to a store, in place of the model that is there.

    The file that makes it a model is removed first and written last: what was not sent whole is no model, and each
    file of a store of objects is there whole or not. Of the older model, the files that `LIST` or the index of its
    weights names are removed; what else is there stays.

    Args:
        folder: Has one of `MARKS`.
        url: Of the folder in the store.

    Raises:
        StorageError: There is something else at the URL, or weights that would be mixed with the model; the store
            fails, or what it then has is of another size.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(LIST, None)
    marks = [name for name in MARKS if name in files]
    if not marks:
        raise StorageError(f"{folder} is no model: it has neither {' nor '.join(MARKS)}")
    with told(url):
        store, root = _opened(url)
        before = _listed(store, root)
        if before and not any(name in before for name in (*MARKS, LIST)):
            raise StorageError(f"{url} exists and is no exported model; choose another place")
        beside = {posixpath.dirname(name) for name in files if name.endswith(_WEIGHTS)}
        older = _of_export(store, root, before, beside) - files.keys()
        _check_strange_weights(before.keys() - older - files.keys(), beside, url)
        _write_list(store, root, older | files.keys())
        for name in MARKS:
            if name in before:
                store.rm_file(f"{root}/{name}")
        for name, file in files.items():
            if name not in marks:
                _send(store, root, name, file, url)
        # With the weights of two models in it, a folder could be read as the older one.
        for name in older - set(MARKS):
            store.rm_file(f"{root}/{name}")
        _write_list(store, root, files)
        for name in marks:
            _send(store, root, name, files[name], url)


def fetch_model(url: str) -> Path:
    """A local copy of a model's folder in a store, fetched once for all processes of this machine.

    The copy is named by the names, sizes and tags of the files, so a model that was changed is fetched again.

    Raises:
        StorageError: There is no whole model, or the store fails.
    """
    with told(url):
        store, root = _opened(url)
        listed = _of_model(store, root)
        if not any(name in listed for name in MARKS):
            said = f"{len(listed)} files, and neither {' nor '.join(MARKS)} among them" if listed else "nothing"
            raise StorageError(f"{url} is no whole model: it has {said}; was it sent to the end?")
        digest = hashlib.sha256(repr((url, sorted(listed.items()))).encode()).hexdigest()[:24]
        target = cache_folder() / "models" / digest
        with _alone(target):
            if not target.exists():
                _fetch(store, root, listed, target)
    return target


def _of_export(store: Any, root: str, before: Iterable[str], beside: Collection[str]) -> set[str]:
    """The files of the model that is there, as far as its list says, and indexes in the folders that weights go to."""
    found: set[str] = set()
    for name in before:
        if name == LIST:
            found.update(store.cat_file(f"{root}/{name}").decode("utf-8", "replace").splitlines())
        elif name.endswith(_INDEX) and posixpath.dirname(name) in beside:
            found |= {name, *_indexed(store.cat_file(f"{root}/{name}"), posixpath.dirname(name))}
    return found & set(before)


def _indexed(content: bytes, folder: str) -> set[str]:
    """The files of weights that an index in `folder` names; none if it cannot be read."""
    try:
        return {posixpath.join(folder, name) for name in json.loads(content)["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def _check_strange_weights(staying: Iterable[str], beside: Collection[str], url: str) -> None:
    """Refuse to send weights to folders in which others stay: a library could read those in their place."""
    strange = sorted(name for name in staying if name.endswith(_WEIGHTS) and posixpath.dirname(name) in beside)
    if strange:
        raise StorageError(
            f"{url} has {', '.join(strange)}, which no export wrote and no index names; remove it, or choose "
            "another place"
        )


def _write_list(store: Any, root: str, names: Iterable[str]) -> None:
    store.makedirs(root, exist_ok=True)
    store.pipe_file(f"{root}/{LIST}", "".join(f"{name}\n" for name in sorted(names)).encode())


def _send(store: Any, root: str, name: str, file: Path, url: str) -> None:
    path = f"{root}/{name}"
    # Stores of objects have no folders; others need them.
    store.makedirs(posixpath.dirname(path), exist_ok=True)
    store.put_file(str(file), path)
    _check_size(store, path, file.stat().st_size, url)


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
        store.invalidate_cache()
        if _of_model(store, root) != listed:
            raise OSError("it was changed while it was fetched; start again")
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
        path.removeprefix(f"{root}/"): (int(said["size"]), next((str(said[tag]) for tag in _TAGS if said.get(tag)), ""))
        for path, said in found.items()
        if path.startswith(f"{root}/") and said["type"] == "file" and not path.endswith("/")
    }


def _of_model(store: Any, root: str) -> dict[str, tuple[int, str]]:
    """As `_listed`, without the list of an export."""
    return {name: said for name, said in _listed(store, root).items() if name != LIST}


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
