"""What is to be checked: an installed plugin, a project's folder, or a wheel that is not installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import attrs
from packaging.utils import canonicalize_name

from cosmos_core.errors import ConfigError
from cosmos_core.plugin.choice import find, kind_of
from cosmos_core.plugin.discovery import PluginRecord, discover
from cosmos_core.plugin.entries import entries
from cosmos_core.plugin.source import editable_folder, field
from cosmos_core.protocols import Kind
from cosmos_core.testing.check.asking import python_path, records_in
from cosmos_core.testing.check.project import as_entry_points, read_project, stale


@attrs.frozen(kw_only=True)
class Subject:
    """A distribution and those of its plugins that are checked.

    Attributes:
        distribution: Its metadata.
        records: The plugins.
        project: The folder of its sources and tests; None where they are not at hand.
        path: Folder that every process of the check has first on its path; None for what is installed.
        stale: How the project's folder differs from what is installed; empty if it does not.
    """

    distribution: Distribution
    records: Sequence[PluginRecord]
    project: Path | None = None
    path: Path | None = None
    stale: str = ""

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
    def environment(self) -> Mapping[str, str]:
        """Variables of every process of the check."""
        return {} if self.path is None else python_path(self.path)

    @property
    def tests(self) -> Path | None:
        """The project's tests."""
        folder = self.project / "tests" if self.project is not None else None
        return folder if folder is not None and folder.is_dir() else None


@contextlib.contextmanager
def subject(target: str | None, kind: Kind | None) -> Iterator[Subject]:
    """What a target means; a wheel is unpacked for as long as the context lasts.

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
            yield _of_kind(_wheel(Path(target), Path(folder)), kind)
    elif _is_folder(target):
        yield _of_kind(_project(Path(target)), kind)
    else:
        yield _installed(target, kind)


def _is_folder(target: str) -> bool:
    """Whether a target can only be meant as a folder: the name of a plugin comes first."""
    if os.sep in target or target in (os.curdir, os.pardir):
        return True
    is_project = (Path(target) / "pyproject.toml").exists()
    return is_project and not any(target == record.name for record in discover())


def _installed(selection: str, kind: Kind | None) -> Subject:
    records = discover()
    record = find(kind or kind_of(selection, records), selection, records)
    dist = importlib.metadata.distribution(record.distribution)
    return Subject(distribution=dist, records=(record,), project=editable_folder(dist))


def _working_directory() -> Subject:
    here = Path.cwd()
    if (here / "pyproject.toml").exists() and any(entries(as_entry_points(read_project(here)))):
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
    name = data.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{folder / 'pyproject.toml'} has no [project] name; add one")
    try:
        dist = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{name} is not installed here; install it first: pip install -e {folder}") from None
    records = tuple(each for each in discover() if _same(each.distribution, name))
    return Subject(distribution=dist, records=records, project=folder.resolve(), stale=stale(data, dist, folder))


def _wheel(file: Path, folder: Path) -> Subject:
    try:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; build it with: python -m build") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{file} cannot be read as a wheel: {error}") from error
    found = list(importlib.metadata.distributions(path=[str(folder)]))
    if not found or not field(found[0], "Name"):
        raise ConfigError(f"{file} is no wheel: it has no .dist-info/METADATA; build it with: python -m build")
    name = field(found[0], "Name")
    records = tuple(each for each in records_in(folder) if _same(each.distribution, name))
    return Subject(distribution=found[0], records=records, project=_project_of(file, name), path=folder)


def _project_of(wheel: Path, name: str) -> Path | None:
    """The project that a wheel was built in, if it lies in its `dist` folder."""
    folder = wheel.resolve().parent.parent
    if wheel.resolve().parent.name != "dist" or not (folder / "pyproject.toml").exists():
        return None
    return folder if _same(str(read_project(folder).get("name")), name) else None


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
