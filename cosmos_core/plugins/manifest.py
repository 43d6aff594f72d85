"""Records what a run was made with: each selected plugin, its version, and a hash of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path, PurePosixPath
from typing import Any

from cosmos_core.config.sources import read, split
from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.discovery import PluginRecord, entries
from cosmos_core.plugins.distributions import Root, distribution, editable_folder, find_root, is_source, recorded_files


def manifest(selected: Iterable[PluginRecord]) -> list[dict[str, Any]]:
    """Plain data of the selected plugins: kind, name, distribution, version, module and `sha256`.

    Args:
        selected: Records, or the `PluginSet` itself.

    Raises:
        PluginBrokenError: A plugin's files cannot be read.
    """
    digests: dict[str, str] = {}
    found = []
    for record in selected:
        file = split(record.module)
        source = record.distribution if file is None else str(file[0])
        if source not in digests:
            digests[source] = _digest(record) if file is None else hashlib.sha256(read(file[0])).hexdigest()
        fields = ("kind", "name", "distribution", "version", "module")
        said = {field: getattr(record, field) for field in fields}
        found.append({**said, "sha256": digests[source]})
    return found


def _digest(record: PluginRecord) -> str:
    """Hash of names and contents of the files in the packages that hold a distribution's entry points.

    Metadata and byte code are left out, so that the same code has the same hash however it was installed.
    """
    files = _files(distribution(record.distribution))
    if not files:
        raise PluginBrokenError(
            f"{record.kind} plugin {record.name!r}: no file of {record.distribution} is found; reinstall it"
        )
    total = hashlib.sha256()
    try:
        for name in sorted(files):
            content = hashlib.sha256(files[name].read_bytes()).hexdigest()
            total.update(f"{content}  {name}\n".encode())
    except OSError as error:
        raise PluginBrokenError(
            f"{record.kind} plugin {record.name!r}: {error.filename} of {record.distribution} cannot be read: "
            f"{error.strerror}; reinstall it"
        ) from error
    return total.hexdigest()


def _files(dist: Distribution) -> dict[str, Path]:
    """The files of the packages with the entry points: those recorded, or all where the record names none of them."""
    matches = [EntryPoint.pattern.match(entry.value) for entry in entries(dist.read_text("entry_points.txt") or "")]
    found = [find_root(match["module"]) for match in matches if match is not None]
    # Several entry points may be in one.
    roots = list(dict.fromkeys(root for root in found if root is not None))
    recorded = [] if editable_folder(dist) is not None else recorded_files(dist)
    ours = {
        file.as_posix(): Path(str(dist.locate_file(file)))
        for file in recorded
        if any(file.is_relative_to(root.name) for root in roots)
    }
    return ours or {name.as_posix(): path for root in roots for name, path in _found(root)}


def _found(root: Root) -> Iterator[tuple[PurePosixPath, Path]]:
    if root.path.is_file():
        yield root.name, root.path
    for path in root.path.rglob("*"):
        name = root.name / path.relative_to(root.path).as_posix()
        if path.is_file() and is_source(name):
            yield name, path
