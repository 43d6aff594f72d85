"""Finds the files of a path option: environment variables, the recipe's folder, globs."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Final

from cosmos_core.errors import DataError

VARIABLE: Final = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def find_files(key: str, value: str, directory: Path) -> list[Path]:
    """The files that a path option names, in order.

    Args:
        key: Key path of the option, for error messages.
        value: Path or glob, with `${NAME}` or `${NAME:-default}` for environment variables.
        directory: Where relative paths start.

    Raises:
        DataError: A variable is not set, or there is no such file.
    """
    path = directory / Path(expand(key, value)).expanduser()
    if path.is_file():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207 - an absolute pattern
    if not found:
        raise DataError(f"{key}: no file at {path} (from {value!r})")
    return found


def expand(key: str, value: str) -> str:
    """The value of an option with its environment variables (see `find_files`); raises DataError if one is not set."""
    return VARIABLE.sub(lambda match: _variable(match, key), value)


def _variable(match: re.Match[str], key: str) -> str:
    value = os.environ.get(match["name"]) or match["default"]
    if value is None:
        raise DataError(
            f"{key}: the environment variable {match['name']} is not set; "
            f"set it, or write ${{{match['name']}:-default}}"
        )
    return value
