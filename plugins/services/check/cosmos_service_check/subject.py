"""The subject of a check: an installed plugin or distribution, a project's folder, or a wheel that is not installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from unittest import mock

import attrs
import msgspec.toml
from packaging.utils import canonicalize_name

from cosmos_core.errors import ConfigError
from cosmos_core.plugins.choice import find, kind_of
from cosmos_core.plugins.discovery import Entry, PluginRecord, discover, entries
from cosmos_core.plugins.distributions import distribution, editable_folder, field
from cosmos_core.protocols import Kind
from cosmos_core.scratch import scratch
from cosmos_service_check.wheel import unpack


class _Project(msgspec.Struct, frozen=True, rename="kebab"):
    """The part of `[project]` that the check reads; the build backend finds the fields of `dynamic`."""

    name: str = ""
    version: str | None = None
    dynamic: tuple[str, ...] = ()
    entry_points: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)

    def plugins(self) -> set[Entry]:
        """The entry points of plugins."""
        groups = ("\n".join([f"[{name}]", *map(" = ".join, each.items())]) for name, each in self.entry_points.items())
        return {*entries("\n".join(groups))}


class _File(msgspec.Struct):
    project: _Project = msgspec.field(default_factory=_Project)


def _read_project(folder: Path) -> _Project:
    """The `[project]` table, empty if there is none; raises ConfigError if it cannot be read."""
    file = folder / "pyproject.toml"
    try:
        return msgspec.toml.decode(file.read_bytes(), type=_File).project
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {str(error).replace('$.', '')}") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _stale(project: _Project, dist: Distribution, folder: Path) -> Iterator[str]:
    """Differences between a project and what is installed of it."""
    again, origin = f"install it again: {_install_line(folder)}", editable_folder(dist)
    if origin is not None and origin.resolve() != folder.resolve():
        yield f"what is installed comes from {origin}; {again}"
    if project.version not in (None, dist.version):
        yield f"pyproject.toml has version {project.version}, {dist.version} is installed; {again}"
    differing = project.plugins() ^ {*entries(dist.read_text("entry_points.txt") or "")}
    if differing and "entry-points" not in project.dynamic:
        shown = "; ".join(sorted(f"{each.group}: {each.name} = {each.value}" for each in differing))
        yield f"entry points differ from what is installed ({shown}); {again}"


def _install_line(folder: Path) -> str:
    return f"pip install -e {shlex.quote(str(folder))}"


@attrs.frozen(kw_only=True)
class Subject:
    """A distribution and those of its plugins that are checked.

    Attributes:
        project: The folder of its sources and tests; None where they are not at hand.
        wheel: The wheel; None for what is installed.
        folder: Where the wheel is unpacked.
        faults: Why installers would refuse the wheel, or how the project's folder differs from what is installed.
    """

    distribution: Distribution
    records: Sequence[PluginRecord]
    project: Path | None = None
    wheel: Path | None = None
    folder: Path | None = None
    faults: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The distribution's name."""
        return field(self.distribution, "Name")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the entry points name; one that names none is left out."""
        matches = [EntryPoint.pattern.match(record.module) for record in self.records]
        return tuple(dict.fromkeys(match["module"] for match in matches if match is not None))

    @property
    def packages(self) -> tuple[str, ...]:
        """The top-level packages of the plugins."""
        return tuple(dict.fromkeys(module.partition(".")[0] for module in self.modules))

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of every process of the check."""
        if self.folder is None:
            return {}
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextlib.contextmanager
def subject(target: str | None, kind: Kind | None) -> Iterator[Subject]:
    """Find the subject that a target names; a wheel is unpacked for as long as the context lasts.

    Args:
        target: Name of a plugin or of a distribution, `distribution:name`, a project's folder, or a wheel; None is the
            working directory.
        kind: Only plugins of this kind.

    Raises:
        ConfigError: It is none of these, not installed, or has no such plugin; the message says what to do.
        PluginError: No plugin has that name, or those of several distributions have.
    """
    with scratch("check") as place:
        if target is not None and target.endswith(".whl"):
            found = _of_wheel(Path(target), place)
        elif target is None or _is_folder(target):
            found = _project(Path(target or Path.cwd()), is_named=target is not None)
        else:
            known = discover()
            records = _named(target) if all(target != record.name for record in known) else ()
            records = records or (find(kind or kind_of(target, known), target, known),)
            dist = distribution(records[0].distribution)
            found = Subject(distribution=dist, records=records, project=editable_folder(dist))
        chosen = [record for record in found.records if kind in (None, record.kind)]
        if not chosen:
            raise ConfigError(
                f"{found.name} has no {kind or 'cosmos-core'} plugin; add an entry point such as "
                f'[project.entry-points."cosmos_core.{kind or "reward"}s"] to its pyproject.toml and install it again'
            )
        yield attrs.evolve(found, records=chosen)


def _is_folder(target: str) -> bool:
    """True if a target can only be meant as a folder: the name of a plugin comes first."""
    if os.sep in target or target in (os.curdir, os.pardir):
        return True
    return (Path(target) / "pyproject.toml").exists() and all(target != record.name for record in discover())


def _project(folder: Path, *, is_named: bool) -> Subject:
    is_there = (folder / "pyproject.toml").exists()
    project = _read_project(folder) if is_there else _Project()
    if not is_there or not (is_named or project.plugins() or "entry-points" in project.dynamic):
        lack = ": its pyproject.toml has no entry points of plugins" if is_there else ", which has a pyproject.toml"
        names = ", ".join(sorted({record.name for record in discover()}))
        raise ConfigError(
            f"{folder} is no plugin's project{lack}; go to one, or say what to check: a plugin "
            f"({names}), a project's folder (./cosmos-reward-x) or a wheel (dist/x.whl)"
        )
    if not project.name:
        raise ConfigError(f"{folder / 'pyproject.toml'} has no [project] name; add one")
    try:
        dist = distribution(project.name)
    except importlib.metadata.PackageNotFoundError:
        line = _install_line(folder)
        raise ConfigError(f"{project.name} is not installed here; install it first: {line}") from None
    faults = tuple(_stale(project, dist, folder))
    return Subject(distribution=dist, records=_named(project.name), project=folder.resolve(), faults=faults)


def _of_wheel(file: Path, folder: Path) -> Subject:
    """A wheel; its project is that in whose `dist` folder it lies."""
    dist, faults = unpack(file, folder)
    file, name = file.resolve(), field(dist, "Name")
    above, project = file.parent.parent, None
    if file.parent.name == "dist" and (above / "pyproject.toml").exists():
        project = above if canonicalize_name(_read_project(above).name) == canonicalize_name(name) else None
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        records = _named(name)
    return Subject(distribution=dist, records=records, project=project, wheel=file, folder=folder, faults=faults)


def _named(distribution: str) -> tuple[PluginRecord, ...]:
    """The plugins of a distribution."""
    name = canonicalize_name(distribution)
    return tuple(each for each in discover() if canonicalize_name(each.distribution) == name)
