"""Folders of models, put in place so that they are whole or no model at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import posixpath
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from cosmos_core.errors import StorageError
from cosmos_core.storage.stores import LocalPlace, Place, opened, told

MARKS: Final = ("config.json", "model_index.json")
"""Files that make a folder a model, for transformers and for diffusers: written last, removed first."""


LIST: Final = ".cosmos-export"
"""Beside an export: the names of its files, a line each. Written first, so that it is also there of an
export that was cut off; no other file is ever removed, but for those that the index of a model's weights names."""

_INDEX: Final = ".safetensors.index.json"
_WEIGHTS: Final = ".safetensors"


def cache_folder() -> Path:
    """The folder of local copies: `COSMOS_CACHE`, or `cosmos` in the user's folder of caches."""
    chosen = os.environ.get("COSMOS_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "cosmos"


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
    files = _files_of(folder)
    with told(url):
        place = opened(url)
        _replace(place, files.keys(), lambda name: place.put(name, files[name]))


def move_folder(folder: Path, target: Path) -> None:
    """Move the files of a model's folder to another one of this machine, by the rules of `send_folder`.

    A link there is replaced as any other file, and what it leads to stays as it is.

    Args:
        folder: Has one of `MARKS`; its files are on the file system of `target`.
        target: The folder; made if it is not there.

    Raises:
        StorageError: There is something else at `target`, or weights that would be mixed with the model; a link or a
            file is in the way of a folder, or a folder in that of a file; it cannot be written.
    """
    files = _files_of(folder)
    place = LocalPlace(target, str(target))
    with told(str(target)):
        _replace(place, files.keys(), lambda name: place.move(name, files[name]))


def check_place(target: Path) -> None:
    """Find out whether `move_folder` could take a place, before there is a model to move.

    Raises:
        StorageError: There is something else.
    """
    with told(str(target)):
        LocalPlace(target, str(target)).check()
        _check_place([path.name for path in target.iterdir()] if target.exists() else [], str(target))


def _files_of(folder: Path) -> dict[str, Path]:
    """The files of a model by their names below its folder, without the list of an export."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(LIST, None)
    if not any(name in files for name in MARKS):
        raise StorageError(f"{folder} is no model: it has neither {' nor '.join(MARKS)}")
    return files


def _replace(place: Place, names: Collection[str], put: Callable[[str], None]) -> None:
    """Put a model, file by file, in the place of the one that is there."""
    place.check()
    before, new = place.listed(), set(names)
    _check_place(before, place.where)
    place.check_ways(names)
    beside = {posixpath.dirname(name) for name in names if name.endswith(_WEIGHTS)}
    older = _of_export(place, before, beside) - new
    staying = sorted(before.keys() - older - new)
    # A library could read those that stay in their place.
    if strange := [name for name in staying if name.endswith(_WEIGHTS) and posixpath.dirname(name) in beside]:
        raise StorageError(
            f"{place.where} has {', '.join(strange)}, which no export wrote and no index names; remove it, or choose "
            "another place"
        )
    _write_list(place, older | new)
    for name in MARKS:
        if name in before:
            place.remove(name)
    marks = [name for name in MARKS if name in new]
    for name in names:
        if name not in marks:
            put(name)
    # With the weights of two models in it, a folder could be read as the older one.
    for name in older - set(MARKS):
        place.remove(name)
    _write_list(place, names)
    for name in marks:
        put(name)


def _check_place(before: Collection[str], where: str) -> None:
    if before and not any(name in before for name in (*MARKS, LIST)):
        raise StorageError(f"{where} exists and is no exported model; choose another place")


def _of_export(place: Place, before: Iterable[str], beside: Collection[str]) -> set[str]:
    """The files of the model that is there, as far as its list says, and indexes in the folders that weights go to."""
    found: set[str] = set()
    for name in before:
        if name == LIST:
            found.update(place.read(name).decode("utf-8", "replace").splitlines())
        elif name.endswith(_INDEX) and posixpath.dirname(name) in beside:
            found |= {name, *_indexed(place.read(name), posixpath.dirname(name))}
    return found & set(before)


def _indexed(content: bytes, folder: str) -> set[str]:
    """The files of weights that an index in `folder` names; none if it cannot be read."""
    try:
        return {posixpath.join(folder, name) for name in json.loads(content)["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def _write_list(place: Place, names: Iterable[str]) -> None:
    place.write(LIST, "".join(f"{name}\n" for name in sorted(names)).encode())


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
    """The listed files, without the list of an export."""
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
