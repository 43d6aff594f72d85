"""What exactly a run was made with: each selected plugin, its version, and a hash of its files."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Any

from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugin.discovery import PluginRecord
from cosmos_core.plugin.source import editable_folder


def manifest(selected: Iterable[PluginRecord]) -> list[dict[str, Any]]:
    """Plain data of the selected plugins: kind, name, distribution, version, module and `sha256`.

    Args:
        selected: Records, or the `PluginSet` itself.

    Raises:
        PluginBrokenError: A plugin's files cannot be read.
    """
    digests: dict[str, str] = {}
    entries = []
    for record in selected:
        if record.distribution not in digests:
            digests[record.distribution] = _digest(record)
        entries.append(
            {
                "kind": record.kind,
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "module": record.module,
                "sha256": digests[record.distribution],
            }
        )
    return entries


def _digest(record: PluginRecord) -> str:
    """Hash of names and contents of a distribution's package files.

    Metadata and byte code are left out, so that the same code has the same hash however it was installed.
    """
    dist = importlib.metadata.distribution(record.distribution)
    files = dict(_package_files(record) if _is_editable(dist) else _recorded_files(dist))
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


def _is_editable(dist: Distribution) -> bool:
    """Whether the distribution's record names none of its code."""
    return editable_folder(dist) is not None or not any(_recorded_files(dist))


def _recorded_files(dist: Distribution) -> Iterator[tuple[str, Path]]:
    # Not `dist.files`: some versions of it leave out what is missing.
    for name, *_ in csv.reader((dist.read_text("RECORD") or "").splitlines()):
        file = PurePosixPath(name)
        outside = file.parts[0] == ".." or file.parts[0].endswith((".dist-info", ".egg-info"))
        if not outside and file.suffix != ".pth" and _is_source(file):
            yield name, Path(str(dist.locate_file(file)))


def _package_files(record: PluginRecord) -> Iterator[tuple[str, Path]]:
    """Files of the top-level package (or module) that the entry point names."""
    spec = importlib.util.find_spec(record.entry_point.module.partition(".")[0])
    if spec is None:
        return
    for location in spec.submodule_search_locations or ():
        root = Path(location)
        for path in root.rglob("*"):
            name = PurePosixPath(path.relative_to(root.parent))
            if path.is_file() and _is_source(name):
                yield name.as_posix(), path
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin).name, Path(spec.origin)


def _is_source(file: PurePosixPath) -> bool:
    return "__pycache__" not in file.parts and file.suffix not in (".pyc", ".pyo")
