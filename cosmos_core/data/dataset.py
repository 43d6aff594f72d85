"""Datasets of two splits: of rows of sources, and of rows that are drawn."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from cosmos_core.data.index import RowIndex, hold_out
from cosmos_core.data.mapping import RowMapping
from cosmos_core.data.options import RowsOptions
from cosmos_core.data.rows import RowSource
from cosmos_core.errors import DataError
from cosmos_core.protocols import Split
from cosmos_core.protocols.dataset import Omission
from cosmos_core.types import Prompt

Sources: TypeAlias = Sequence[RowSource]


class RowsDataset:
    """The dataset (see `Dataset` and `DatasetExtras`).

    Args:
        name: Of the plugin, for people.
        options: When rows are checked, and which are held out.
        mapping: Makes prompts of rows.
        train: Where the train rows are.
        heldout: Where the held-out rows are; None if they are some of the train rows, or if there are none.
        key_path: Of the options in the recipe, for messages (see `DatasetContext`).
        heldout_mapping: Makes prompts of the rows of `heldout`; as `mapping` does if None.

    Raises:
        DataError: A source is missing, unreadable, empty or has a bad row (source, line, reason).
    """

    def __init__(
        self,
        name: str,
        options: RowsOptions,
        mapping: RowMapping,
        train: Sources,
        heldout: Sources | None,
        *,
        key_path: str = "dataset.options",
        heldout_mapping: RowMapping | None = None,
    ) -> None:
        self._name: Final = name
        trained = RowIndex(train, mapping, options, key_path)
        held = None if heldout is None else RowIndex(heldout, heldout_mapping or mapping, options, key_path)
        train_rows, heldout_rows = _numbers(options, len(trained), 0 if held is None else len(held), key_path)
        self._splits: Final[dict[Split, tuple[RowIndex, range | array[int]]]] = {
            "train": (trained, train_rows),
            "heldout": (held or trained, heldout_rows),
        }
        self._omitted: Final[dict[Split, tuple[Omission, ...]]] = {
            "train": trained.omissions.told(),
            "heldout": () if held is None else held.omissions.told(),
        }

    def size(self, split: Split) -> int:
        """Number of usable rows."""
        return len(self._splits[split][1])

    def row(self, split: Split, index: int) -> Prompt:
        """Read row `index` of the split.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: The row is bad, or its source changed since it was checked.
        """
        rows, numbers = self._splits[split]
        if not 0 <= index < len(numbers):
            raise IndexError(f"{self._name}: row {index} of split {split!r}, which has {len(numbers)}")
        return rows.prompt(numbers[index])

    def omitted(self, split: Split) -> tuple[Omission, ...]:
        """Rows of the split's sources that have no number; of rows held out of the train rows, see `train`."""
        return self._omitted[split]


def _numbers(
    options: RowsOptions, num_train: int, num_heldout: int, key_path: str
) -> tuple[range | array[int], range | array[int]]:
    """Row numbers of the train and held-out splits within their sources."""
    wanted = options.heldout_rows
    if options.heldout_fraction is not None:
        wanted = max(1, round(options.heldout_fraction * num_train))
    if wanted is None:
        return range(num_train), range(num_heldout)
    if wanted >= num_train:
        raise DataError(f"{key_path}: cannot hold {wanted} rows out of {num_train}; none would be left to train on")
    return hold_out(num_train, wanted)


class DrawnDataset(ABC):
    """Rows that are a pure function of the run's seed, the split and the index (see `Dataset`).

    Args:
        name: Of the dataset, for people.
        seed: `DatasetContext.seed`.
        sizes: Rows of each split.
    """

    def __init__(self, name: str, seed: int, sizes: Mapping[Split, int]) -> None:
        self._name: Final = name
        self._seed: Final = seed
        self._sizes: Final = dict(sizes)

    @abstractmethod
    def draw(self, rng: random.Random, split: Split) -> Prompt:
        """Draw one row of a split.

        Args:
            rng: This row's own.
            split: The split; what is drawn for one should never be drawn for the other (see `is_held_out`).
        """

    def size(self, split: Split) -> int:
        """Number of rows."""
        return self._sizes[split]

    def row(self, split: Split, index: int) -> Prompt:
        """Draw row `index` of the split.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"{self._name}: row {index} of split {split!r}, which has {self.size(split)}")
        # A string seeds by its SHA-512, so a row is the same in every process and Python version.
        return self.draw(random.Random(f"{self._seed}:{split}:{index}"), split)  # noqa: S311 - rows, not secrets


def is_held_out(key: str, share: float) -> bool:
    """True if what a row is about belongs to the held-out split: by a hash of it, so the same in every run.

    Args:
        key: What the row is about, such as the numbers of a problem.
        share: Of all keys, that the held-out split has.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
