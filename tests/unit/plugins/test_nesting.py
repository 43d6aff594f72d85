"""Datasets that are made of others."""

from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError, PluginNotFoundError
from cosmos_core.plugins.recipe import dataset_context, named_parts
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import DatasetContext


def test_parts_are_named_at_every_level_by_tables_with_a_plugin():
    inner = {"plugin": "b", "options": {"part": {"plugin": "c"}}}
    parts = {"part": {"plugin": "a"}, "parts": [inner, {"plugin": "a", "options": {"x": 1}}]}
    assert [(name, path) for _, name, _, path in named_parts(parts, "o")] == [
        ("a", "o.part.options"),
        ("b", "o.parts.0.options"),
        ("c", "o.parts.0.options.part.options"),
        ("a", "o.parts.1.options"),
    ]
    for options in [{}, 3, {"part": "a"}, {"parts": 3}, {"parts": [{"plugin": 4}, "x"]}]:
        assert list(named_parts(options)) == []


def test_a_part_is_made_with_the_same_context_and_joins_the_plugins():
    plugins = PluginSet.load([("dataset", "shapes")])
    context = dataset_context(plugins, 3, Path("here"))
    part = context.make("arithmetic", {"train_rows": 5}, "part.options")
    assert part.size("train") == 5
    assert [record.name for record in plugins] == ["shapes", "arithmetic"]
    again = context.make("arithmetic", {}, "part.options")
    assert again is not part
    assert len(list(plugins)) == 2


def test_errors_of_a_part_have_the_whole_path_of_its_options():
    context = dataset_context(PluginSet(), 0, Path())
    with pytest.raises(ConfigError, match=r"dataset\.options\.parts\.1\.options\.train_row: unknown option"):
        context.make("arithmetic", {"train_row": 5}, "parts.1.options")
    with pytest.raises(PluginNotFoundError, match="arithmetics"):
        context.make("arithmetics", {}, "part.options")
    context = dataset_context(PluginSet(), 0, Path())
    parts = [{"plugin": "arithmetic", "options": {"train_row": 5}}]
    whole = r"dataset\.options\.parts\.1\.options\.parts\.0\.options"
    with pytest.raises(ConfigError, match=rf"{whole}\.train_row: unknown option"):
        context.make("mixture", {"parts": parts}, "parts.1.options")


def test_a_context_without_plugins_makes_nothing():
    with pytest.raises(ConfigError, match="part: dataset 'arithmetic' is asked for where no other dataset can be made"):
        DatasetContext(seed=0, directory=Path()).make("arithmetic", {}, "part")
