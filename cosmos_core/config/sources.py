"""Plugins that are functions or classes of a file, `PATH.py:NAME` in a recipe: where the file is, and a run's copy.

In a recipe in memory each such path is absolute. In the files of a run's folder it starts there: the folder may move.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core.errors import ConfigError

FOLDER: Final = "plugins"
"""In a run's folder: its copies, `plugins/SHA/NAME.py`, with the first twelve digits of each file's SHA-256."""
_FILE: Final = re.compile(r"(?P<path>.*\.py):(?P<name>[^:/]+)", re.DOTALL)


def split(selection: str) -> tuple[Path, str] | None:
    """The file and the name in it; None for the name of an installed plugin."""
    found = _FILE.fullmatch(selection)
    return None if found is None else (Path(found["path"]), found["name"])


def label(selection: str) -> str:
    """The name that a plugin is reported under: that of a file is long, and the same on no two machines."""
    found = split(selection)
    return selection if found is None else found[1]


def is_copy(path: Path) -> bool:
    """True if a file lies where a run keeps one: its folder says what its SHA-256 begins with."""
    return path.parent.parent.name == FOLDER and re.fullmatch(r"[0-9a-f]{12}", path.parent.name) is not None


def absolute(selection: str, folder: Path) -> str:
    """A selection with its path, if it has one, that starts at a folder made absolute; ConfigError: no such home."""
    found = split(selection)
    try:
        return selection if found is None else f"{(folder / found[0].expanduser()).absolute()}:{found[1]}"
    except RuntimeError as error:
        raise ConfigError(f"plugin: {selection}: {error}") from None


def located(data: Any, folder: Path) -> Any:
    """Plain data of a recipe, with every `plugin` of a file that starts at a folder made absolute."""
    return _changed(data, lambda path: Path(absolute(f"{path}:x", folder)[:-2]))


def within(data: Any, folder: Path) -> Any:
    """The same, with the files that lie in a folder written as they start there."""
    root = folder.absolute()
    return _changed(data, lambda path: path.relative_to(root) if path.is_relative_to(root) else path)


def anywhere(data: Any) -> Any:
    """The same, with the last two parts of each path: of a run's copies, the SHA and the file, on every machine."""
    return _changed(data, lambda path: Path(*path.parts[-2:]))


def copied(data: Any, folder: Path) -> tuple[Any, dict[Path, bytes]]:
    """The same, with files as a run in `folder` keeps them, and what is in those that it has no copy of yet.

    Raises:
        ConfigError: A file cannot be read.
    """
    files: dict[Path, bytes] = {}
    root = folder.absolute() / FOLDER

    def keep(path: Path) -> Path:
        if path.is_relative_to(root):
            return path  # never read for another version: one that was tampered with is refused when it is loaded
        content = read(path)
        place = root / version_of(content) / path.name
        files[place] = content
        return place

    return _changed(data, keep), files


def version_of(content: bytes) -> str:
    """The first twelve digits of a file's SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def read(path: Path) -> bytes:
    """The content of such a file; raises ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"plugin: the file {path} cannot be read: {error.strerror}") from error


def _changed(value: Any, change: Callable[[Path], Path], key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _changed(item, change, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    found = split(value) if key == "plugin" and isinstance(value, str) else None
    return value if found is None else f"{change(found[0])}:{found[1]}"
