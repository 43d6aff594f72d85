"""The rows of a dataset, the easiest first."""

from __future__ import annotations

import math
import random
from array import array
from typing import Final

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.protocols.dataset import Omission, Window
from cosmos_core.types import Prompt
from cosmos_dataset_curriculum.options import CurriculumOptions
from cosmos_dataset_curriculum.pacing import windows


class Curriculum:
    """The dataset: train rows are numbered by difficulty, equally hard ones in an order drawn from the run's seed.

    Every train row is read once when it is made, in every process; a row then costs eight bytes of memory.

    Raises:
        ConfigError: The part's options are wrong, or it has a pace of its own.
        DataError: The part cannot be read, or a train row has no difficulty.
    """

    def __init__(self, options: CurriculumOptions, context: DatasetContext) -> None:
        self._options: Final = options
        self._part: Final = context.make(options.part.plugin, options.part.options, "part.options")
        if hasattr(self._part, "windows"):
            raise ConfigError(
                f"{context.key_path}.part.plugin: {options.part.plugin!r} has a pace of its own; "
                "name the dataset that it is made of"
            )
        self._ranked: Final = _ranked(self._part, options, context)

    def size(self, split: Split) -> int:
        """Rows of the part."""
        return self._part.size(split)

    def row(self, split: Split, index: int) -> Prompt:
        """Row `index` of the split: the easiest train row is number 0.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: The row is unusable.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"curriculum: row {index} of split {split!r}, which has {self.size(split)}")
        return self._part.row(split, self._ranked[index] if split == "train" else index)

    def omitted(self, split: Split) -> tuple[Omission, ...]:
        """The rows that the part leaves out."""
        found: tuple[Omission, ...] = self._part.omitted(split) if hasattr(self._part, "omitted") else ()
        return found

    def windows(self, num_prompts: int) -> tuple[Window, ...]:
        """The windows in which train rows become available over the first prompts of a stage."""
        options = self._options
        return windows(
            math.ceil(options.over * num_prompts),
            len(self._ranked),
            start=options.start,
            pacing=options.pacing,
            num_windows=options.num_windows,
        )


def _ranked(part: Dataset, options: CurriculumOptions, context: DatasetContext) -> array[int]:
    """Numbers of the train rows, the easiest first."""
    sign = -1.0 if options.hardest_first else 1.0
    key = f"{context.key_path}.difficulty"
    difficulties = array("d", (sign * _difficulty(part, index, options, key) for index in range(part.size("train"))))
    order = list(range(len(difficulties)))
    random.Random(f"{context.seed}:curriculum").shuffle(order)  # noqa: S311 - an order, no secret
    order.sort(key=difficulties.__getitem__)
    return array("Q", order)


def _difficulty(part: Dataset, index: int, options: CurriculumOptions, key: str) -> float:
    metadata, name = part.row("train", index).metadata, options.difficulty
    value = metadata.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        seen = f"{value!r:.80}, no number" if name in metadata else f"not there; it has {', '.join(metadata) or 'none'}"
        raise DataError(
            f"{options.part.plugin}: train row {index}: its metadata {name!r} is {seen}; give each row a number, named "
            f"in the part's `metadata` and in {key}"
        )
    return float(value)


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide curricula, whose rows have what their part's have."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True, preferences=True)
    return Provider(create=Curriculum, options=CurriculumOptions, capabilities=capabilities)
