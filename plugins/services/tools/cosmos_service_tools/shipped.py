"""The recipes in the folder `recipes` of cosmos-core, which the checkout and the wheel have alike."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config.loading import SHIPPED, load_recipe
from cosmos_core.config.problems import nearest
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import ConfigError

_SENTENCE_END: Final = re.compile(r"[.:]?(?:\s*$|(?<=[.])\s)")
_HARDWARE: Final = re.compile(r"on (a CPU|\d+ GPUs?)\b")


def folder() -> Path:
    """The folder of the recipes.

    Raises:
        ConfigError: The installation has none.
    """
    if not SHIPPED.is_dir():
        raise ConfigError(f"{SHIPPED}: no such folder, so cosmos-core's recipes are not here; reinstall cosmos-core")
    return SHIPPED.resolve()


@attrs.frozen
class ShippedRecipe:
    """One recipe; `root` is the folder of all."""

    root: Path
    path: Path

    @property
    def name(self) -> str:
        """Its path below the folder, without the suffix."""
        return self.path.relative_to(self.root).with_suffix("").as_posix()

    @property
    def text(self) -> str:
        """The file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def comment(self) -> str:
        """The first paragraph of its comment."""
        lines = []
        for line in self.text.splitlines():
            words = line.removeprefix("#").strip()
            if not line.startswith("#") or not words:
                break
            lines.append(words)
        return " ".join(lines)

    @property
    def title(self) -> str:
        """The first sentence of its comment, which says what it trains; its name where there is no comment."""
        return _SENTENCE_END.split(self.comment, maxsplit=1)[0] or self.name

    @property
    def hardware(self) -> str:
        """The processors that its comment says it is made for; empty if it says nothing."""
        found = _HARDWARE.search(self.comment)
        return "" if found is None else found[1]

    def load(self) -> Recipe:
        """The recipe, structured."""
        return load_recipe(self.path)

    @property
    def table(self) -> dict[str, Any]:
        """The TOML as plain data."""
        return tomllib.loads(self.text)


def shipped() -> list[ShippedRecipe]:
    """All of them, sorted by name, those of the folder itself first; a TOML file without `[run]` is no recipe."""
    root = folder()
    found = [ShippedRecipe(root, path) for path in root.rglob("*.toml")]
    return sorted((each for each in found if "run" in each.table), key=lambda each: (each.name.count("/"), each.name))


def find(name: str) -> ShippedRecipe:
    """The recipe of a name.

    Raises:
        ConfigError: There is none; the nearest names are told.
    """
    wanted = name.removesuffix(".toml").removeprefix("recipes/")
    recipes = {recipe.name: recipe for recipe in shipped()}
    if wanted in recipes:
        return recipes[wanted]
    close = [each for each in recipes if each.endswith(f"/{wanted}")] or nearest(wanted, recipes, limit=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`cosmos recipes list` prints the names"
    raise ConfigError(f"no recipe {name!r} ships with cosmos-core; {hint}")
