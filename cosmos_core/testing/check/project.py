"""What a project's `pyproject.toml` says, and how that differs from what is installed of it."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path

import msgspec

from cosmos_core.errors import ConfigError
from cosmos_core.plugins.discovery import entries
from cosmos_core.plugins.distributions import editable_folder


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
    """What to type to install a project."""
    return f"pip install -e {shlex.quote(str(folder))}"


def stale(project: Project, dist: Distribution, folder: Path) -> str:
    """How a project differs from what is installed of it; empty if it does not.

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
