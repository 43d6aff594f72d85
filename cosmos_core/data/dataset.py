"""Datasets of two splits: of rows of sources, and of rows that are drawn."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from cosmos_core.data.mapping import RowMapping
from cosmos_core.data.options import RowsOptions
from cosmos_core.data.rows import BadRowError, LeftOutError, RowSource
from cosmos_core.errors import DataError
from cosmos_core.protocols import Split
from cosmos_core.protocols.dataset import Omission
from cosmos_core.types import Prompt

Sources: TypeAlias = Sequence[RowSource]
_MANY: Final = "other reasons"
_MOST_REASONS: Final = 50
_LOOKED_AT: Final = 100
"""Rows that are asked whether they have what an option names."""


class Omissions:
    """Rows that were left out so far; the first of each reason is remembered."""

    def __init__(self) -> None:
        self._found: Final[dict[str, Omission]] = {}

    def add(self, reason: str, place: str) -> None:
        """Count a row at a place, by what it has in common with others; beyond 50 reasons the rest count together."""
        if reason not in self._found and len(self._found) >= _MOST_REASONS:
            reason = _MANY
        known = self._found.get(reason, Omission(reason=reason, num_rows=0, first=place))
        self._found[reason] = attrs.evolve(known, num_rows=known.num_rows + 1)

    @property
    def total(self) -> int:
        """The number of rows of all reasons."""
        return sum(each.num_rows for each in self._found.values())

    def told(self) -> tuple[Omission, ...]:
        """The reasons, the most frequent first."""
        return tuple(sorted(self._found.values(), key=lambda each: (-each.num_rows, each.reason)))


logger = logging.getLogger(__name__)


class RowIndex:
    """Every usable row of the sources, in their order.

    Args:
        sources: Where rows are.
        mapping: Makes prompts of them, and decides what is usable.
        options: When rows are checked, and what becomes of bad ones.
        key_path: Of the options in the recipe, for messages.

    Raises:
        DataError: A source cannot be read, a row is bad (source, line, reason), or no row is left.
    """

    def __init__(self, sources: Sequence[RowSource], mapping: RowMapping, options: RowsOptions, key_path: str) -> None:
        self._sources: Final = sources
        self._mapping: Final = mapping
        self._options: Final = options
        self._key_path: Final = key_path
        self._source_numbers: Final = array("I")
        self._locators: Final = array("Q")
        self.omissions: Final = Omissions()
        """Rows that are in none of the numbers."""
        for number, source in enumerate(sources):
            if options.check_rows == "at-start":
                self._check(number, source)
            else:
                self._locators.extend(source.places())
                self._source_numbers.extend([number] * (len(self._locators) - len(self._source_numbers)))
        if not self._locators:
            raise DataError(self._emptiness())
        for each in self.omissions.told():
            logger.warning("%d row(s) left out: %s; the first: %s", each.num_rows, each.reason, each.first)

    def __len__(self) -> int:
        return len(self._locators)

    def prompt(self, number: int) -> Prompt:
        """Usable row `number`, from 0.

        Raises:
            DataError: The row is bad; if all were checked at the start, the source changed since.
        """
        source_number = self._source_numbers[number]
        source = self._sources[source_number]
        try:
            return self._mapping.prompt(source.read(self._locators[number]), source.folder)
        except BadRowError as error:
            row = number - bisect.bisect_left(self._source_numbers, source_number)
            if self._options.check_rows == "at-start":
                raise DataError(f"{source.name}: usable row {row}: {error}; it changed since the run began") from error
            raise DataError(f"{source.name}: row {row}: {error}") from error

    def _check(self, number: int, source: RowSource) -> None:
        for raw in source.scan():
            problem = BadRowError(raw.problem, raw.problem.partition(":")[0]) if raw.problem else None
            try:
                if problem is None:
                    self._mapping.prompt(raw.row, source.folder)
            except BadRowError as error:
                problem = error
            if problem is None:
                self._source_numbers.append(number)
                self._locators.append(raw.locator)
            elif self._options.on_bad_row == "refuse" and not isinstance(problem, LeftOutError):
                raise DataError(f"{source.name}:{raw.line}: {problem} ({self._remedy(problem, source)})")
            else:
                self.omissions.add(problem.kind, f"{source.name}:{raw.line}: {problem}")

    def _remedy(self, problem: BadRowError, source: RowSource) -> str:
        named = f"{self._key_path}.{problem.option} names it" if problem.option else ""
        rows = [raw.row for raw in itertools.islice(source.scan(), _LOOKED_AT)]
        if named and not any(isinstance(row, Mapping) and problem.missing in row for row in rows):
            return f"{named}, and no row of the first {len(rows)} has it: mend the option"
        return f"{named}{'; ' if named else ''}mend the row, or set {self._key_path}.on_bad_row = 'skip'"

    def _emptiness(self) -> str:
        names = ", ".join(source.name for source in self._sources)
        if not self.omissions.total:
            return f"{names}: empty; give a source that has rows"
        counts = "; ".join(f"{each.num_rows} x {each.reason}" for each in self.omissions.told())
        return f"{names}: no usable rows ({self.omissions.total} skipped: {counts}); give a source that has some"


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
        self._omitted: Final = {"train": trained.omissions, "heldout": held.omissions if held else Omissions()}

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
        return self._omitted[split].told()


def _numbers(
    options: RowsOptions, num_train: int, num_heldout: int, key_path: str
) -> tuple[range | array[int], range | array[int]]:
    """Row numbers of the train and held-out splits within their sources, each in order."""
    wanted = options.heldout_rows
    if options.heldout_fraction is not None:
        wanted = max(1, round(options.heldout_fraction * num_train))
    if wanted is None:
        return range(num_train), range(num_heldout)
    if wanted >= num_train:
        raise DataError(f"{key_path}: cannot hold {wanted} rows out of {num_train}; none would be left to train on")
    # Drawn at random, and always the same ones: runs with different seeds are compared on the same rows.
    heldout = set(random.Random("heldout").sample(range(num_train), wanted))  # noqa: S311 - no secret
    train = array("Q", (number for number in range(num_train) if number not in heldout))
    return train, array("Q", sorted(heldout))


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
