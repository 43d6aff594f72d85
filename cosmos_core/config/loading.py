"""Recipes from TOML files and the command line; jobs from the run's folder."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import tomli_w

from cosmos_core.config.checks import check_recipe
from cosmos_core.config.dynamic import with_values
from cosmos_core.config.job import Job
from cosmos_core.config.overrides import apply_override, apply_selections
from cosmos_core.config.problems import nearest
from cosmos_core.config.schema import Recipe
from cosmos_core.config.sources import located, within
from cosmos_core.config.structure import structure, unstructure, with_checksum, without_checksum
from cosmos_core.errors import ConfigError
from cosmos_core.files import replace_file
from cosmos_core.types import Scalar


def dump_recipe(recipe: Recipe, folder: Path | None = None) -> str:
    """TOML that loads to an equal recipe from a file in `folder`, without keys that have no value: it has no null."""
    data = unstructure(recipe)
    return tomli_w.dumps(_without_none(data if folder is None else within(data, folder)))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


DEFAULT_STEPS: Final = 100
"""`run.steps` of a run without a recipe file."""
SHIPPED: Final = Path(__file__).parents[1] / "recipes"
"""The folder of the recipes that ship with cosmos-core."""


def load_recipe(
    path: Path | None,
    *,
    overrides: Sequence[str] = (),
    selections: Mapping[str, str | Sequence[str]] | None = None,
    refuse: Callable[[Mapping[str, Any], ConfigError], None] | None = None,
) -> Recipe:
    """Load, change, structure and check a recipe; without a path it starts from `selections` and `overrides` alone.

    Overrides, `a.b.c=VALUE`, are applied in order after the selections, plugin names by kind. A ConfigError lists every
    problem of a step: the file, unknown keys, wrong values, or keys that contradict each other; see `recipe_from`.
    """
    data = {} if path is None else located(read_toml(path), path.parent)
    apply_selections(data, selections or {})
    for override in overrides:
        apply_override(data, override)
    if path is None:
        _name_run(data)
    return recipe_from(located(data, Path()), refuse)


def recipe_from(
    data: Mapping[str, Any], refuse: Callable[[Mapping[str, Any], ConfigError], None] | None = None
) -> Recipe:
    """Structure and check a recipe given as plain data; `refuse` may raise what tells more than its ConfigError."""
    try:
        recipe = structure(data, Recipe)
        check_recipe(recipe)
    except ConfigError as error:
        if refuse is not None:
            refuse(data, error)
        raise
    return recipe


def read_toml(path: Path, what: str = "recipe") -> dict[str, Any]:
    """Read a TOML file; errors say `what` it is, and where it is no TOML (line and column)."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        name = str(path).removeprefix("recipes/").removesuffix(".toml")
        is_shipped = what == "recipe" and (SHIPPED / f"{name}.toml").is_file()
        hint = f"; `cosmos recipes copy {name}` writes the one of cosmos-core" if is_shipped else _similar_file(path)
        raise ConfigError(f"{path}: no such {what}{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}{_line_of(path, str(error))}") from None


def save_job(job: Job) -> Path:
    """Write `job.json` into the run's folder; a crash leaves the old one or the new one, never a part."""
    path = job.directory / "job.json"
    data = json.dumps(with_checksum(within(unstructure(job), job.directory)), indent=1)
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, data.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def load_job(run_dir: Path) -> Job:
    """Read the job of a run; a folder that was moved since is the job's folder now."""
    path = Path(run_dir) / "job.json"
    try:
        data = without_checksum(json.loads(path.read_text(encoding="utf-8")), str(path))
        if isinstance(data, dict):
            data.pop("rows", None)  # an earlier release's digests, of other content than `row_digests`
        return attrs.evolve(structure(located(data, path.parent), Job, path=str(path)), directory=path.parent)
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: not the folder of a run (it has no job.json)") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{path}: made by another version of cosmos-core, or damaged ({str(error).splitlines()[0]}); use the "
            "version that made it, restore the file, or remove the run's folder to make the run anew"
        ) from error


def run_of(model: Path) -> Job | None:
    """The run whose export this folder is (it lies within the run's folder); None if it is of no run."""
    for folder in (model, *model.resolve().parents[:2]):
        if (folder / "job.json").is_file():
            return load_job(folder)
    return None


def _name_run(data: MutableMapping[str, Any]) -> None:
    """Name a run without a recipe file after its algorithm and dataset, and give it a length."""
    run = data.setdefault("run", {})
    if not isinstance(run, MutableMapping):
        return
    tables = [data.get(kind) for kind in ("algorithm", "dataset")]
    plugins = [table["plugin"] for table in tables if isinstance(table, Mapping) and "plugin" in table]
    name = "-".join(str(plugin).rpartition(":")[2] for plugin in plugins)
    if name:
        run.setdefault("name", name)
    run.setdefault("steps", DEFAULT_STEPS)


def _similar_file(path: Path) -> str:
    try:
        names = [sibling.stem for sibling in path.parent.iterdir() if sibling.suffix == ".toml"]
    except OSError:
        return f"; the folder {path.parent} does not exist"
    # Without the suffix, which would make any two names alike.
    close = nearest(path.name.removesuffix(".toml"), names)
    return f"; did you mean {path.with_name(f'{close[0]}.toml')}?" if close else ""


def _line_of(path: Path, message: str) -> str:
    """The line that a TOML error is about."""
    found = re.search(r"at line (\d+)", message)
    if found is None:
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = int(found[1])
    return f"\n  {number} | {lines[number - 1]}" if number <= len(lines) else ""


def recipe_with(recipe: Recipe, values: Mapping[str, Scalar]) -> Recipe:
    """A recipe with other values of dynamic keys."""
    return recipe_from(with_values(unstructure(recipe), values))
