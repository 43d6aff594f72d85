"""Copies a recipe with the files that it refers to, and has the copy refer to theirs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core.errors import ConfigError
from cosmos_service_tools.shipped import ShippedRecipe

_NEIGHBOUR: Final = re.compile(r"[\w.-]+\.toml")


def copy_recipe(recipe: ShippedRecipe, target: Path, *, overwrite: bool) -> list[Path]:
    """Copy a recipe to the file `target`, and what it refers to below the same folder, laid out as in `recipes`.

    Returns:
        The copies of other files.

    Raises:
        ConfigError: The target is no .toml file, or something else is there and not to be overwritten, or cannot be
            written.
    """
    if target.suffix != ".toml" or target.is_dir():
        raise ConfigError(f"{target}: give the copy's file, such as {target / Path(recipe.name).name}.toml")
    copies = {target.parent / path.relative_to(recipe.root): path for path in _referred(recipe)}
    contents = {path: source.read_bytes() for path, source in copies.items()}
    contents[target] = _rewritten(recipe, target, copies).encode()
    if there := [] if overwrite else sorted(path for path, content in contents.items() if _is_other(path, content)):
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ConfigError(
            f"{there[0]}{more}: there already, with other content; keep it and choose another PATH, or replace it with "
            "--overwrite"
        )
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return list(copies)


def _is_other(path: Path, content: bytes) -> bool:
    return path.exists() and not (path.is_file() and path.read_bytes() == content)


def _referred(recipe: ShippedRecipe) -> list[Path]:
    """Files of `recipes` that a recipe, its comment or its rows name, in order, each once."""
    found: dict[Path, None] = {}
    # A name without a slash is a plugin's, or anything.
    for value in (each for each in _texts(recipe.table) if "/" in each):
        for path in _files(recipe, recipe.path.parent / value):
            found[path] = None
            found.update(dict.fromkeys(_of_rows(recipe, path)))
    for name in _NEIGHBOUR.findall(recipe.text):
        beside = recipe.path.with_name(name)
        # Another recipe is named beside, not needed.
        if beside.is_file() and "run" not in ShippedRecipe(recipe.root, beside).table:
            found[beside] = None
    return list(found)


def _files(recipe: ShippedRecipe, path: Path) -> Iterator[Path]:
    """The file at a path, or those in the folder there; none that lie outside of `recipes`."""
    path = Path(os.path.normpath(path))
    if not path.is_relative_to(recipe.root) or path in recipe.path.parents:
        return
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())


def _of_rows(recipe: ShippedRecipe, path: Path) -> Iterator[Path]:
    """Files that the rows of a JSONL file name, such as pictures."""
    if path.suffix == ".jsonl":
        for line in path.read_text(encoding="utf-8").splitlines():
            for value in _texts(json.loads(line)):
                # A name of a file, not words.
                if "\n" not in value and len(value) < 200:
                    yield from (each for each in _files(recipe, path.parent / value) if each.is_file())


def _texts(value: Any) -> Iterator[str]:
    """The texts in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _rewritten(recipe: ShippedRecipe, target: Path, copies: Mapping[Path, Path]) -> str:
    """The text of the copy: its paths lead to the copies, or to where this folder has what `recipes` has beside it."""
    text = recipe.text
    for value in dict.fromkeys(_texts(recipe.table)):
        path = Path(os.path.normpath(recipe.path.parent / value))
        if not value.startswith("../"):
            beside = path if path.exists() and path.is_relative_to(recipe.root) else None
            new = None if beside is None else beside.relative_to(recipe.root).as_posix()
        elif path.is_relative_to(recipe.root):
            new = path.relative_to(recipe.root).as_posix()
        else:
            new = os.path.relpath(path.relative_to(recipe.root.parent), target.parent)
        if new is not None:
            text = text.replace(f'"{value}"', f'"{new}"')
    for path, source in [(target, recipe.path), *copies.items()]:
        text = text.replace(source.relative_to(recipe.root.parent).as_posix(), path.as_posix())
    return text
