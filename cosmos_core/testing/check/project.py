"""What a project's `pyproject.toml` says, and how that differs from what is installed of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError
from cosmos_core.plugin.entries import entries
from cosmos_core.plugin.source import editable_folder


def read_project(folder: Path) -> dict[str, Any]:
    """The `[project]` table; empty if there is none.

    Raises:
        ConfigError: The file is no TOML.
    """
    file = folder / "pyproject.toml"
    try:
        data = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    project = data.get("project", {})
    return project if isinstance(project, dict) else {}


def as_entry_points(project: Mapping[str, Any]) -> str:
    """The entry points of `[project]` in the format of installed metadata."""
    lines = []
    for group, members in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in members.items())]
    return "\n".join(lines)


def stale(project: Mapping[str, Any], dist: Distribution, folder: Path) -> str:
    """How a project differs from what is installed of it; empty if it does not.

    Args:
        project: Its `[project]` table.
        dist: What is installed under its name.
        folder: Its folder.
    """
    again = f"install it again: pip install -e {folder}"
    origin = editable_folder(dist)
    if origin is not None and origin.resolve() != folder.resolve():
        return f"what is installed comes from {origin}; {again}"
    version = project.get("version", dist.version)
    if version != dist.version:
        return f"pyproject.toml has version {version}, {dist.version} is installed; {again}"
    if "entry-points" in project.get("dynamic", ()):
        return ""
    written = {(each.group, each.name, each.value) for each in entries(as_entry_points(project))}
    known = {(each.group, each.name, each.value) for each in entries(dist.read_text("entry_points.txt") or "")}
    differing = sorted(f"{group}: {name} = {value}" for group, name, value in written ^ known)
    return f"entry points differ from what is installed ({'; '.join(differing)}); {again}" if differing else ""
