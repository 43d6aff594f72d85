"""A building block of datasets whose rows are drawn when they are asked for, instead of read."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from cosmos_core.protocols.dataset import Split
from cosmos_core.types import Prompt


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
    """Whether what a row is about belongs to the held-out split: by a hash of it, so the same in every run.

    Args:
        key: What the row is about, such as the numbers of a problem.
        share: Of all keys, that the held-out split has.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
