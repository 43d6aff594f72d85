"""Shard maps as tables of boxes, ranks that hold the same and tensors that are split the same way taken together.

B: boxes; D: dims of the tensor with the most, to which all others are padded by dims of one element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices

Integers: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class Table:
    """The boxes of some ranks, those of equal ranks once.

    Attributes:
        kind_of: Of each rank, its kind: ranks of one kind hold the same.
        tensor_B: Number of the tensor.
        kind_B: Kind of the ranks that hold the box.
        first_BD: First index of the box.
        end_BD: The index after its last.
    """

    kind_of: Integers
    tensor_B: Integers
    kind_B: Integers
    first_BD: Integers
    end_BD: Integers

    @classmethod
    def of(cls, ranks: Iterable[Sequence[TensorSlice]], numbers: Mapping[str, int], num_dims: int) -> Self:
        """Of what each rank holds; slices of other tensors than those in `numbers`, and empty ones, are left out."""
        kinds: dict[tuple[TensorSlice, ...], int] = {}
        kind_of = [kinds.setdefault(tuple(held), len(kinds)) for held in ranks]
        # Per number of dims, as rows of one array must be equally long.
        rows: dict[int, list[tuple[int, ...]]] = {}
        for held, kind in kinds.items():
            for piece in disjoint(held):
                number = numbers.get(piece.name)
                if number is not None:
                    rows.setdefault(len(piece.start), []).append((number, kind, *piece.start, *piece.shape))
        parts = [_padded(np.array(found, np.int64), dims, num_dims) for dims, found in sorted(rows.items())]
        table = np.concatenate([np.zeros((0, 2 + 2 * num_dims), np.int64), *parts])
        first, size = table[:, 2 : 2 + num_dims], table[:, 2 + num_dims :]
        table = table[(size > 0).all(1)]
        table = table[np.lexsort((*table.T[:0:-1], table[:, 0]))]
        first, size = table[:, 2 : 2 + num_dims], table[:, 2 + num_dims :]
        return cls(
            kind_of=np.array(kind_of, np.int64),
            tensor_B=table[:, 0],
            kind_B=table[:, 1],
            first_BD=first,
            end_BD=first + size,
        )

    def members(self) -> list[Integers]:
        """The ranks of each kind."""
        order = np.argsort(self.kind_of, kind="stable")
        bounds = np.searchsorted(self.kind_of[order], np.arange(int(self.kind_of.max(initial=-1)) + 1))
        return np.split(order, bounds[1:]) if len(bounds) else []

    def by_tensor(self, num_tensors: int) -> list[tuple[slice, bytes]]:
        """Of each tensor, its rows, and what is equal for tensors that are split the same way among the same kinds."""
        rows = np.concatenate([self.kind_B[:, None], self.first_BD, self.end_BD], axis=1)
        bounds = np.searchsorted(self.tensor_B, np.arange(num_tensors + 1)).tolist()
        return [(slice(a, b), rows[a:b].tobytes()) for a, b in itertools.pairwise(bounds)]


def disjoint(held: Sequence[TensorSlice]) -> list[TensorSlice]:
    """What a rank holds, each element once."""
    by_name: dict[str, list[TensorSlice]] = {}
    for piece in held:
        known = by_name.setdefault(piece.name, [])
        rest = [piece]
        for other in known:
            rest = [part for each in rest for part in slices.without(each, other)]
        known.extend(rest)
    return [piece for pieces in by_name.values() for piece in pieces]


def _padded(rows: Integers, dims: int, num_dims: int) -> Integers:
    """Rows of (tensor, kind, start, size) with dims added in front, of one element each."""
    lacking = num_dims - dims
    zeros, ones = np.zeros((len(rows), lacking), np.int64), np.ones((len(rows), lacking), np.int64)
    return np.concatenate([rows[:, :2], zeros, rows[:, 2 : 2 + dims], ones, rows[:, 2 + dims :]], axis=1)
