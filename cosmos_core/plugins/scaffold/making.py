"""Write a new package, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from cosmos_core.errors import ConfigError, PluginConflictError
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.known import KNOWN
from cosmos_core.plugins.scaffold.naming import Names
from cosmos_core.plugins.scaffold.rendering import render


def new_package(kind: str, name: str, *, into: Path, author: str = "", description: str = "") -> Path:
    """Write a complete package with a working minimal plugin.

    Args:
        kind: What it plugs in.
        name: What recipes will call it.
        into: The folder in which the package's own folder is made.
        author: Who makes it.
        description: One line about it.

    Returns:
        The package's folder, `into/cosmos-<kind>-<name>`.

    Raises:
        ConfigError: An argument cannot be used, or the folder exists or cannot be made.
        PluginConflictError: Another plugin has the name.
    """
    names = Names.of(kind, name)
    _check_free(names)
    files = render(names, author=author, description=description)
    if not into.is_dir():
        raise ConfigError(f"--into {into}: there is no such folder; make it first, or name another")
    target = into / names.distribution
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists and is left as it is; remove it, or choose another name or --into folder")
    try:
        _write(target, files)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}; name another folder with --into"
        ) from error
    return target


def _check_free(names: Names) -> None:
    """Two plugins of one kind and name cannot be told apart in a recipe, and confuse whoever reads it."""
    kind, name = names.kind, names.name
    owners = {
        f"{record.distribution} {record.version}"
        for record in discover(kind)
        if record.name == name and record.status != "invalid"
    }
    if not owners and (kind, name) in KNOWN:
        owners = {KNOWN[kind, name]}
    if owners:
        raise PluginConflictError(
            f"the {kind} {name!r} is provided by {' and by '.join(sorted(owners))}; choose another name"
        )


def _write(target: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write beside the target and rename: whoever interrupts this leaves nothing half made."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        made = Path(beside) / target.name
        for path, text in files.items():
            file = made / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        made.rename(target)
