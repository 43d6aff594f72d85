"""Datasets that are made of other datasets: the context by which one makes its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetContext
from cosmos_core.types import JSON


def named_parts(options: Mapping[str, JSON]) -> Iterator[str]:
    """Names of the datasets that a dataset is made of, so that a run knows them before it makes any.

    By convention its options name them in a table `part` or a list of tables `parts`, each with `plugin` and `options`.
    """
    single, several = options.get("part"), options.get("parts")
    for table in (single, *(several if isinstance(several, list | tuple) else ())):
        # What is no such table is refused where the options are structured.
        if isinstance(table, Mapping) and isinstance(table.get("plugin"), str):
            yield str(table["plugin"])
            nested: Any = table.get("options")
            yield from named_parts(nested if isinstance(nested, Mapping) else {})


def dataset_context(plugins: PluginSet, seed: int, directory: Path) -> DatasetContext:
    """The context of a run's dataset.

    Args:
        plugins: Where plugins of parts are loaded, and so become part of the run's record.
        seed: `run.seed`.
        directory: Folder of the recipe file.
    """
    return _context(plugins, seed, directory, "dataset.options")


def _context(plugins: PluginSet, seed: int, directory: Path, key_path: str) -> DatasetContext:
    """The context of a dataset whose options are at this key path."""

    def make(plugin: str, options: Mapping[str, JSON], path: str) -> Dataset:
        plugins.include("dataset", plugin)
        place = f"{key_path}.{path}"
        context = _context(plugins, seed, directory, place)
        return cast("Dataset", plugins.create("dataset", plugin, options, context, place))

    return DatasetContext(seed=seed, directory=directory, key_path=key_path, make=make)
