"""Rows of several datasets under numbers of their own."""

from __future__ import annotations

import bisect
import heapq
import itertools
from array import array
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.config.order import row_of
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.protocols.dataset import Omission
from cosmos_core.types import Prompt
from cosmos_dataset_mixture.options import MixtureOptions, Part
from cosmos_dataset_mixture.proportions import rows_of_epoch


class Mixture:
    """The mixture. An epoch of it has a fixed number of rows of each part; the run shuffles it, as any other.

    Rows of a part are drawn in the part's own shuffled epochs, so that within an epoch of the mixture each comes as
    often as any other, to within one; those that come once more are the same in every epoch.

    Raises:
        ConfigError: A part's options are wrong, or a part cannot be mixed.
        DataError: A part cannot be read, has no train rows, or too few for its weight.
    """

    def __init__(self, options: MixtureOptions, context: DatasetContext) -> None:
        self._options: Final = options
        self._seed: Final = context.seed
        self._key_path: Final = context.key_path
        self._parts: Final = tuple(_make(number, part, context) for number, part in enumerate(options.parts))
        self._sizes: Final = tuple(part.size("train") for part in self._parts)
        self._counts: Final = self._checked(_counts(options, self._sizes))
        self._ends: Final = tuple(itertools.accumulate(self._counts))
        self._heldout: Final = _Interleaved([part.size("heldout") for part in self._parts])

    def size(self, split: Split) -> int:
        """Rows of an epoch; held-out rows are those of all parts, each once."""
        return self._ends[-1] if split == "train" else len(self._heldout)

    def row(self, split: Split, index: int) -> Prompt:
        """Read row `index` of the split; its metadata say which `part` it is of.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: The part's row is unusable.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"mixture: row {index} of split {split!r}, which has {self.size(split)}")
        part, row = self._heldout.place(index) if split == "heldout" else self._drawn(index)
        prompt = self._parts[part].row(split, row)
        label, inner = self._options.parts[part].label, prompt.metadata.get("part")
        named = label if inner is None else f"{label}/{inner}"
        return attrs.evolve(prompt, metadata={**prompt.metadata, "part": named})

    def omitted(self, split: Split) -> tuple[Omission, ...]:
        """The rows that the parts leave out, and those that no epoch has."""
        found = []
        for number, (part, dataset) in enumerate(zip(self._options.parts, self._parts, strict=True)):
            if hasattr(dataset, "omitted"):
                found += [attrs.evolve(each, reason=f"{part.label}: {each.reason}") for each in dataset.omitted(split)]
            beyond = self._sizes[number] - self._counts[number]
            if split == "train" and beyond > 0:
                reason = f"{part.label}: beyond the end of the shortest part"
                found.append(Omission(reason=reason, num_rows=beyond, first="drawn by the run's seed"))
        return tuple(found)

    def _drawn(self, index: int) -> tuple[int, int]:
        part = bisect.bisect_right(self._ends, index)
        slot = index - (self._ends[part] - self._counts[part])
        return part, row_of(slot, self._sizes[part], self._seed, part)[1]

    def _checked(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        for part, count in zip(self._options.parts, counts, strict=True):
            if not count:
                raise DataError(
                    f"{self._key_path}.parts: an epoch that ends with the shortest part has no row of {part.label!r} "
                    f"(weight {part.weight:g}); set {self._key_path}.epoch = 'longest', or change the weights"
                )
        return counts


class _Interleaved:
    """All rows of all parts, each part spread evenly: the first so many have about as many of each as the whole."""

    def __init__(self, sizes: Sequence[int]) -> None:
        streams = [_spread(part, size) for part, size in enumerate(sizes)]
        self._parts: Final = array("I")
        self._rows: Final = array("Q")
        for _, part, row in heapq.merge(*streams):
            self._parts.append(part)
            self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> tuple[int, int]:
        """(part, row) at an index."""
        return self._parts[index], self._rows[index]


def _spread(part: int, size: int) -> list[tuple[float, int, int]]:
    return [((row + 0.5) / size, part, row) for row in range(size)]


def _make(number: int, part: Part, context: DatasetContext) -> Dataset:
    path = f"parts.{number}"
    dataset = context.make(part.plugin, part.options, f"{path}.options")
    if hasattr(dataset, "windows"):
        raise ConfigError(
            f"{context.key_path}.{path}.plugin: {part.plugin!r} paces its rows, which a mixture would shuffle; "
            "make the mixture the part of it instead"
        )
    if not dataset.size("train"):
        raise DataError(
            f"{context.key_path}.{path}: {part.plugin!r} has no train rows; remove it, or check its options"
        )
    return dataset


def _counts(options: MixtureOptions, sizes: Sequence[int]) -> tuple[int, ...]:
    return rows_of_epoch(sizes, [part.weight for part in options.parts], options.epoch)


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide mixtures, whose rows have what their parts' have."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True, preferences=True)
    return Provider(create=Mixture, options=MixtureOptions, capabilities=capabilities)
