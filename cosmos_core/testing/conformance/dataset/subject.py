"""The dataset under test, and which of its rows are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, DatasetContext, Kind, Split
from cosmos_core.testing.conformance.dataset.reading import SPLITS, Place, Rows, read_rows, spread
from cosmos_core.testing.conformance.plugin import PluginConformance


class DatasetSubject(PluginConformance):
    """What the tests of datasets share; `DatasetConformance` describes what to override."""

    kind: ClassVar[Kind] = "dataset"
    num_rows: ClassVar[int] = 48
    repeats_rows: ClassVar[bool] = False
    holds_out_train_rows: ClassVar[bool] = False

    @pytest.fixture
    def context(self, plugins: PluginSet, tmp_path: Path) -> DatasetContext:
        """A dataset's context: seed 0, and an empty folder for the recipe's."""
        return dataset_context(plugins, 0, tmp_path)

    @pytest.fixture
    def dataset(self, make: Callable[..., Any]) -> Dataset:
        """The dataset."""
        made: Dataset = make()
        return made

    @pytest.fixture
    def sizes(self, dataset: Dataset) -> dict[Split, int]:
        """Rows of each split, if they are numbers."""
        if any(size_problem(dataset, split) for split in SPLITS):
            pytest.skip("its sizes are no sizes; test_sizes_are_numbers says why")
        return {split: dataset.size(split) for split in SPLITS}

    @pytest.fixture
    def places(self, sizes: dict[Split, int]) -> list[Place]:
        """The rows that the tests read, split after split in order: at most `num_rows` of each."""
        return [(split, index) for split, size in sizes.items() for index in spread(size, self.num_rows)]

    @pytest.fixture
    def rows(self, dataset: Dataset, places: list[Place]) -> Rows:
        """Those rows, if they can be read."""
        try:
            return read_rows(dataset, places)
        except pytest.fail.Exception:
            pytest.skip("its rows cannot be read; test_rows_are_prompts says why")


def size_problem(dataset: Dataset, split: Split) -> str:
    """What is wrong with the size of a split; empty if nothing is."""
    try:
        size: Any = dataset.size(split)
    except Exception as error:  # noqa: BLE001 - whatever it raises is told
        return f"size({split!r}) raised {type(error).__name__}: {error}; return 0 where the split does not exist"
    if not isinstance(size, int) or isinstance(size, bool):
        return f"size({split!r}) is {size!r:.100}, a {type(size).__name__}; return an int"
    return f"size({split!r}) is {size}; return 0 where the split does not exist" if size < 0 else ""
