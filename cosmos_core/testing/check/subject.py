"""The subject of a check: an installed plugin, a project's folder, or a wheel that is not installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import attrs
import msgspec
from packaging.utils import canonicalize_name

from cosmos_core.errors import ConfigError
from cosmos_core.plugins.choice import find, kind_of
from cosmos_core.plugins.discovery import PluginRecord, discover, entries
from cosmos_core.plugins.distributions import distribution, editable_folder, field
from cosmos_core.protocols import Kind
from cosmos_core.testing.check.processes import python_path, records_in
from cosmos_core.testing.check.wheel import Wheel, unpack


class Project(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The part of `[project]` that the check reads.

    Attributes:
        name: Name of the distribution; empty if there is none.
        version: Its version; None if the build backend finds it.
        dynamic: Fields that the build backend finds.
        entry_points: Names and values of each group.
    """

    name: str = ""
    version: str | None = None
    dynamic: tuple[str, ...] = ()
    entry_points: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)

    @property
    def entry_points_text(self) -> str:
        """The entry points in the format of installed metadata."""
        lines = []
        for group, members in self.entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in members.items())]
        return "\n".join(lines)


class _File(msgspec.Struct):
    project: Project = msgspec.field(default_factory=Project)


def read_project(folder: Path) -> Project:
    """The `[project]` table; empty if there is none.

    Raises:
        ConfigError: The file is no TOML, or a key has a value of a wrong type.
    """
    file = folder / "pyproject.toml"
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), _File).project
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {str(error).replace('$.', '')}") from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def install_line(folder: Path) -> str:
    """The command that installs a project."""
    return f"pip install -e {shlex.quote(str(folder))}"


def stale(project: Project, dist: Distribution, folder: Path) -> str:
    """Differences between a project and what is installed of it; empty if it does not.

    Args:
        project: What its `pyproject.toml` says.
        dist: What is installed under its name.
        folder: Its folder.
    """
    again = f"install it again: {install_line(folder)}"
    origin = editable_folder(dist)
    if origin is not None and origin.resolve() != folder.resolve():
        return f"what is installed comes from {origin}; {again}"
    if project.version not in (None, dist.version):
        return f"pyproject.toml has version {project.version}, {dist.version} is installed; {again}"
    if "entry-points" in project.dynamic:
        return ""
    written = {(each.group, each.name, each.value) for each in entries(project.entry_points_text)}
    known = {(each.group, each.name, each.value) for each in entries(dist.read_text("entry_points.txt") or "")}
    differing = sorted(f"{group}: {name} = {value}" for group, name, value in written ^ known)
    return f"entry points differ from what is installed ({'; '.join(differing)}); {again}" if differing else ""


@attrs.frozen(kw_only=True)
class Subject:
    """A distribution and those of its plugins that are checked.

    Attributes:
        distribution: Its metadata.
        records: The plugins.
        project: The folder of its sources and tests; None where they are not at hand.
        wheel: The wheel, unpacked; None for what is installed.
        stale: How the project's folder differs from what is installed; empty if it does not.
    """

    distribution: Distribution
    records: Sequence[PluginRecord]
    project: Path | None = None
    wheel: Wheel | None = None
    stale: str = ""

    @property
    def name(self) -> str:
        """The distribution's name."""
        return field(self.distribution, "Name")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the entry points name; one that names none is left out."""
        return _modules(self.records)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of every process of the check."""
        return {} if self.wheel is None else python_path(self.wheel.folder)


def packages(records: Iterable[PluginRecord]) -> tuple[str, ...]:
    """The top-level packages of plugins."""
    return tuple(dict.fromkeys(module.partition(".")[0] for module in _modules(records)))


@contextlib.contextmanager
def subject(target: str | None, kind: Kind | None) -> Iterator[Subject]:
    """Find the subject that a target names; a wheel is unpacked for as long as the context lasts.

    Args:
        target: A plugin's name, `distribution:name`, a project's folder, or a wheel; None is the working directory.
        kind: Only plugins of this kind.

    Raises:
        ConfigError: It is none of these, or not installed; the message says what to do.
        PluginError: No plugin has that name, or those of several distributions have.
    """
    if target is None:
        yield _of_kind(_working_directory(), kind)
    elif target.endswith(".whl"):
        with tempfile.TemporaryDirectory(prefix="cosmos-check-") as folder:
            yield _of_kind(_of_wheel(Path(target), Path(folder)), kind)
    elif _is_folder(target):
        yield _of_kind(_project(Path(target)), kind)
    else:
        yield _installed(target, kind)


def _is_folder(target: str) -> bool:
    """True if a target can only be meant as a folder: the name of a plugin comes first."""
    if os.sep in target or target in (os.curdir, os.pardir):
        return True
    is_project = (Path(target) / "pyproject.toml").exists()
    return is_project and not any(target == record.name for record in discover())


def _installed(selection: str, kind: Kind | None) -> Subject:
    records = discover()
    record = find(kind or kind_of(selection, records), selection, records)
    dist = distribution(record.distribution)
    return Subject(distribution=dist, records=(record,), project=editable_folder(dist))


def _working_directory() -> Subject:
    here = Path.cwd()
    if (here / "pyproject.toml").exists() and any(entries(read_project(here).entry_points_text)):
        return _project(here)
    names = sorted({record.name for record in discover()})
    raise ConfigError(
        f"{here} is no plugin's project; go to one, or say what to check: "
        f"a plugin ({', '.join(names)}), a project's folder (./cosmos-reward-x) or a wheel (dist/x.whl)"
    )


def _project(folder: Path) -> Subject:
    if not (folder / "pyproject.toml").exists():
        raise ConfigError(f"{folder} has no pyproject.toml; give the folder of a plugin's project, or a wheel")
    data = read_project(folder)
    name = data.name
    if not name:
        raise ConfigError(f"{folder / 'pyproject.toml'} has no [project] name; add one")
    try:
        dist = distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{name} is not installed here; install it first: {install_line(folder)}") from None
    records = tuple(each for each in discover() if _same(each.distribution, name))
    return Subject(distribution=dist, records=records, project=folder.resolve(), stale=stale(data, dist, folder))


def _of_wheel(file: Path, folder: Path) -> Subject:
    wheel = unpack(file, folder)
    name = field(wheel.distribution, "Name")
    records = tuple(each for each in records_in(folder) if _same(each.distribution, name))
    return Subject(distribution=wheel.distribution, records=records, project=_project_of(file, name), wheel=wheel)


def _project_of(wheel: Path, name: str) -> Path | None:
    """The project that a wheel was built in, if it lies in its `dist` folder."""
    folder = wheel.resolve().parent.parent
    if wheel.resolve().parent.name != "dist" or not (folder / "pyproject.toml").exists():
        return None
    return folder if _same(read_project(folder).name, name) else None


def _of_kind(found: Subject, kind: Kind | None) -> Subject:
    """The subject with the plugins of a kind only.

    Raises:
        ConfigError: There are none.
    """
    records = [record for record in found.records if kind in (None, record.kind)]
    if not records:
        raise ConfigError(
            f"{found.name} has no {kind or 'cosmos-core'} plugin; add an entry point such as "
            f'[project.entry-points."cosmos_core.{kind or "reward"}s"] to its pyproject.toml and install it again'
        )
    return attrs.evolve(found, records=records)


def _same(one: str, other: str) -> bool:
    return canonicalize_name(one) == canonicalize_name(other)


def _modules(records: Iterable[PluginRecord]) -> tuple[str, ...]:
    matches = [EntryPoint.pattern.match(record.module) for record in records]
    return tuple(dict.fromkeys(match["module"] for match in matches if match is not None))
