"""What the ranks of an engine hold together: which of them has which cell of a tensor, and the digest of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from cosmos_core.errors import AttestationError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.digest import add_digests, combine

Boxes: TypeAlias = Mapping[str, Sequence[TensorSlice]]
"""The slices of one rank, disjoint, by name."""
Cell: TypeAlias = tuple[TensorSlice, frozenset[int]]
"""A slice, and the ranks that hold all of it; no other holds any of it."""


class RankCells:
    """The cells of each tensor: disjoint, and all that any rank holds."""

    def __init__(self, names: Iterable[str], held: Mapping[int, Boxes]) -> None:
        """Divide what ranks hold.

        Args:
            names: Every tensor, those that no rank holds included.
            held: The slices of each rank.
        """
        self._ranks: Final = tuple(held)
        self._cells: Final[dict[str, list[Cell]]] = {
            name: divide({rank: boxes.get(name, ()) for rank, boxes in held.items()}) for name in names
        }

    def num_held(self, name: str) -> int:
        """Elements of a tensor that ranks hold, each counted once."""
        return sum(slices.size(cell) for cell, _ in self._cells[name])

    def of(self, rank: int) -> dict[str, list[TensorSlice]]:
        """The cells that a rank holds, whose digests it is asked for."""
        return {name: [cell for cell, ranks in cells if rank in ranks] for name, cells in self._cells.items()}

    def combine(self, digests: Mapping[int, Mapping[str, Sequence[int]]], owner: str) -> str:
        """The digest of all tensors.

        Args:
            digests: Of each rank, those of its cells, as `of` has them.
            owner: Whose ranks these are, for errors: "the engine", "vLLM".

        Raises:
            AttestationError: Ranks that hold the same cell hold other values; names both, and the cell.
        """
        return combine(add_digests({name: digest} for name, digest in self._agreed(digests, owner)))

    def _agreed(self, digests: Mapping[int, Mapping[str, Sequence[int]]], owner: str) -> Iterator[tuple[str, int]]:
        for name, cells in self._cells.items():
            given = {rank: iter(digests[rank][name]) for rank in self._ranks}
            if not cells:
                yield name, 0
            for cell, ranks in cells:
                found = {rank: next(given[rank]) for rank in sorted(ranks)}
                first, *others = found
                for rank in others:
                    if found[rank] != found[first]:
                        raise AttestationError(
                            f"{name}: ranks {first} and {rank} of {owner} hold other values in the slice of "
                            f"{cell.shape} at {cell.start}, which both were given"
                        )
                yield name, found[first]


def divide(held: Mapping[int, Sequence[TensorSlice]]) -> list[Cell]:
    """Disjoint slices of a tensor, each with those that hold all of it.

    Args:
        held: The slices of each rank of one tensor, disjoint within a rank.
    """
    cells: list[Cell] = []
    for rank, boxes in held.items():
        for box in filter(slices.size, boxes):
            rest, divided = [box], []
            for cell, ranks in cells:
                common = slices.overlap(cell, box)
                if common is None:
                    divided.append((cell, ranks))
                    continue
                divided += [(part, ranks) for part in slices.subtract(cell, common)]
                divided.append((common, ranks | {rank}))
                rest = [part for each in rest for part in slices.without(each, common)]
            cells = divided + [(part, frozenset({rank})) for part in rest]
    return cells
