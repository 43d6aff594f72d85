"""Installed distributions, their metadata and where their modules lie; a damaged one does not hide the others."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Any, Final, final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import attrs

from cosmos_core.errors import PluginBrokenError


@final
class Readable(Distribution):
    """A distribution whose files can be read even where they are not UTF-8; everything else follows from that."""

    def __init__(self, dist: Distribution) -> None:
        self._dist = dist

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file, undecodable bytes replaced; None if there is none that can be read."""
        try:
            return self._dist.read_text(filename)
        except UnicodeDecodeError as error:
            return error.object.decode(errors="replace")
        except OSError:
            return None

    # The type of what this returns differs between versions of Python.
    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """The place of a file of the distribution, given its path in the record."""
        return self._dist.locate_file(path)


def distributions(path: Sequence[str] | None = None) -> Iterator[Readable]:
    """Everything that is installed, or that lies in the folders of `path`."""
    found = importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=[*path])
    return map(Readable, found)


def distribution(name: str) -> Readable:
    """The installed distribution of a name.

    Raises:
        PackageNotFoundError: There is none.
    """
    return Readable(importlib.metadata.distribution(name))


_IDENTITY: Final = re.compile(r"^(Name|Version):[ \t]*(.*?)\s*$", re.MULTILINE)
_NOT_PACKAGES: Final = ("..", ".dist-info", ".egg-info", ".data")
"""How the first part of a file's path ends where it is outside, or about the distribution itself."""


@attrs.frozen
class Identity:
    """Name and version of a distribution; empty where they are missing, as in what an interrupted pip leaves behind."""

    name: str
    version: str


def identity(dist: Distribution) -> Identity:
    """Name and version. Reads them without parsing the rest: a listing asks this of all that is installed."""
    readable = Readable(dist)
    headers = (readable.read_text("METADATA") or readable.read_text("PKG-INFO") or "").partition("\n\n")[0]
    found = dict(reversed(_IDENTITY.findall(headers)))
    return Identity(found.get("Name", ""), found.get("Version", ""))


def field(dist: Distribution, key: str) -> str:
    """A field of the metadata; empty where it is missing, as in what an interrupted pip leaves behind."""
    try:
        metadata = dist.metadata
    except FileNotFoundError:
        return ""
    return metadata[key] if key in metadata else ""  # noqa: SIM401  # `get` is not in its protocol on Python 3.11


def licence(dist: Distribution) -> str:
    """The licence, from the newest of the three ways to say it; empty if it says none."""
    named = field(dist, "License-Expression") or field(dist, "License").partition("\n")[0]
    if named:
        return named
    classifiers = dist.metadata.get_all("Classifier") or []
    return next((each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")), "")


def editable_folder(dist: Distribution) -> Path | None:
    """The project's folder of an editable installation; None of any other."""
    try:
        origin = json.loads(Readable(dist).read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            return None
        return Path(url2pathname(urlsplit(origin["url"]).path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"its direct_url.json is not as pip writes it ({type(error).__name__}: {error})"
        raise PluginBrokenError(f"{identity(dist).name}: {problem}; reinstall it") from error


def recorded_files(dist: Distribution) -> list[PurePosixPath]:
    """Files that a distribution installs among the packages of all others, in the order of its record.

    Left out are its own metadata, byte code, and what lies outside, such as scripts in `../../../bin`.

    Raises:
        PluginBrokenError: Its record has a name that no installer writes.
    """
    names = [row[0] for row in record_rows(dist)]
    for name in names:
        if not _can_be_recorded(name):
            raise PluginBrokenError(f"{identity(dist).name}: its RECORD names a file {name!r}; reinstall it")
    files = [PurePosixPath(name) for name in names]
    return [file for file in files if is_source(file) and not file.parts[0].endswith(_NOT_PACKAGES)]


def record_rows(dist: Distribution) -> list[list[str]]:
    """Rows of the record, each with a file's name first; raises PluginBrokenError if it is no CSV."""
    text = Readable(dist).read_text("RECORD") or ""
    try:
        return [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise PluginBrokenError(f"{identity(dist).name}: its RECORD cannot be read: {error}; reinstall it") from error


def is_source(file: PurePosixPath) -> bool:
    """True if a file is neither byte code nor a recipe that ships with the core, or what that refers to."""
    is_code = "__pycache__" not in file.parts and file.suffix not in (".pyc", ".pyo")
    return is_code and file.parts[:2] != ("cosmos_core", "recipes")


def _can_be_recorded(name: str) -> bool:
    """True if a name is relative, and leads out of the installation only by its beginning."""
    file = PurePosixPath(name)
    inside = [*itertools.dropwhile("..".__eq__, file.parts)]
    return bool(inside) and ".." not in inside and "\0" not in name and not file.is_absolute()


@attrs.frozen
class Root:
    """The part of a module's path that is one project's: its outermost regular package, or a module outside of any.

    Namespace packages round it are shared with other projects.

    Attributes:
        name: Its path as an installer records it, such as `acme/rewards`.
        path: Its folder or file.
    """

    name: PurePosixPath
    path: Path


def exists(module: str) -> bool:
    """True if a module can be found."""
    return any(name == module for name, _ in _specs(module))


def find_root(module: str, path: Sequence[str] | None = None) -> Root | None:
    """The root of a module; None if it cannot be found in the file system.

    Args:
        module: Its name.
        path: Folders to look in; those of `sys.path` if not given.
    """
    for name, spec in _specs(module, path):
        # A namespace package has no file.
        if spec.origin is not None and spec.has_location:
            file, recorded = Path(spec.origin), PurePosixPath(*name.split("."))
            if spec.submodule_search_locations is not None:
                return Root(recorded, file.parent)
            return Root(recorded.with_name(file.name), file)
    return None


def _specs(module: str, path: Sequence[str] | None = None) -> Iterator[tuple[str, ModuleSpec]]:
    """Names and specs of the packages that a module is in, outermost first, and its own: as many as can be found."""
    parts = module.split(".")
    locations = path
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        spec = _find_spec(name, locations)
        if spec is None:
            return
        yield name, spec
        if spec.submodule_search_locations is None:
            return
        locations = [*spec.submodule_search_locations]


def _find_spec(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # For a namespace package, `PathFinder` wants its parent imported, unless the name has none.
        asked = name.rpartition(".")[2] if finder is PathFinder else name
        try:
            spec = finder.find_spec(asked, locations)
        except (AttributeError, ImportError, KeyError, ValueError):
            continue
        if spec is not None:
            return spec
    return None
