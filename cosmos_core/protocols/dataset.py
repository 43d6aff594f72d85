"""What a dataset plugin implements: numbered rows of two splits.

The run owns the order: it draws rows by index from a permutation of its seed and epoch, so any dataset is
shuffled, resumed in the middle and shared between replicas without code of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import attrs

from cosmos_core.types import Prompt

Split: TypeAlias = Literal["train", "heldout"]


@attrs.frozen(kw_only=True)
class DatasetContext:
    """What a dataset is told of the run.

    Attributes:
        seed: `run.seed`; generated datasets draw their rows from it.
        directory: Folder of the recipe file; relative paths in options are relative to it.
    """

    seed: int
    directory: Path


@attrs.frozen(kw_only=True)
class DatasetCapabilities:
    """What a dataset holds.

    Attributes:
        demonstrations: Whether its rows have demonstrations, for supervised algorithms.
        references: Whether its rows have references, for rewards that compare.
    """

    demonstrations: bool = False
    references: bool = True


class Dataset(Protocol):
    """Numbered rows. Every process that makes it sees the same rows at the same numbers."""

    def size(self, split: Split) -> int:
        """Number of rows; known when the dataset is made. 0 where the split does not exist.

        Raises:
            DataError: A file is missing, unreadable or has a bad row (file, line, reason).
        """
        ...

    def row(self, split: Split, index: int) -> Prompt:
        """Row `index` of the split, always the same.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: The row is unusable (file, line, reason).
        """
        ...
