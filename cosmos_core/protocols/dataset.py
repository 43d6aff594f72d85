"""The protocol of dataset plugins: numbered rows of two splits.

The run owns the order: it draws rows by index from a permutation of its seed and epoch, so any dataset is
shuffled, resumed in the middle and shared between replicas without code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import attrs

from cosmos_core.errors import ConfigError
from cosmos_core.types import JSON, Prompt

Split: TypeAlias = Literal["train", "heldout"]


def _makes_no_others(plugin: str, _options: Mapping[str, JSON], path: str) -> Dataset:
    raise ConfigError(f"{path}: dataset {plugin!r} is asked for where no other dataset can be made")


@attrs.frozen(kw_only=True)
class DatasetContext:
    """The run, as a dataset is told of it.

    Attributes:
        seed: `run.seed`; generated datasets draw their rows from it.
        directory: Folder of the recipe file; relative paths in options are relative to it.
        key_path: Of its options in the recipe, for messages; of a part, such as `dataset.options.parts.0.options`.
        make: Makes a dataset that this one is made of, by the name of its plugin, its options, and their key path
            within those of this one, such as `parts.0.options`; of this context but for the key path.
    """

    seed: int
    directory: Path
    key_path: str = attrs.field(default="dataset.options", eq=False)
    make: Callable[[str, Mapping[str, JSON], str], Dataset] = attrs.field(default=_makes_no_others, eq=False)


@attrs.frozen(kw_only=True)
class DatasetCapabilities:
    """The contents of a dataset.

    Attributes:
        demonstrations: Whether its rows have demonstrations, for supervised algorithms.
        references: Whether its rows have references, for rewards that compare.
        preferences: Whether its rows have a rejected completion beside their demonstration.
    """

    demonstrations: bool = False
    references: bool = True
    preferences: bool = False


class Dataset(Protocol):
    """Numbered rows. Every process that makes it sees the same rows at the same numbers."""

    def size(self, split: Split) -> int:
        """Number of rows; known when the dataset is made. 0 where the split does not exist.

        Raises:
            DataError: A file is missing, unreadable or has a bad row (file, line, reason).
        """

    def row(self, split: Split, index: int) -> Prompt:
        """Row `index` of the split, always the same.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: The row is unusable (file, line, reason).
        """


@attrs.frozen(kw_only=True)
class Omission:
    """Rows that are left out for one reason.

    Attributes:
        reason: What they have in common.
        num_rows: How many they are.
        first: The first of them: where it is, and what it is like.
    """

    reason: str
    num_rows: int
    first: str


@attrs.frozen(kw_only=True)
class Window:
    """Consecutive prompts of a stage that are drawn from the first rows only.

    Attributes:
        num_prompts: How many prompts.
        num_rows: They are drawn from train rows `range(num_rows)`, each once before any comes again.
    """

    num_prompts: int
    num_rows: int


class DatasetExtras(Protocol):
    """Methods that a dataset may have beside those of `Dataset`: any of them, each found by its name."""

    def omitted(self, split: Split) -> tuple[Omission, ...]:
        """Rows of the source that have no number in the split, by reason; known when the dataset is made."""

    def windows(self, num_prompts: int) -> tuple[Window, ...]:
        """The windows in which train rows become available during a stage, in order, as in a curriculum.

        Prompts after them are drawn from all rows. Asked for once, by the plan.

        Args:
            num_prompts: Prompts that the stage trains on as planned; more are drawn where some are dropped.
        """
