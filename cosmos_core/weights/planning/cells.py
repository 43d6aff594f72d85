"""Cuts what is wanted of a tensor into cells, each of which is held by certain sources as a whole.

S: boxes of sources; T: boxes that are wanted; C: cells; D: dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.weights.planning.tables import Integers


@attrs.frozen(kw_only=True, eq=False)
class Cells:
    """Disjoint cells within each wanted box.

    Attributes:
        wanted_C: The wanted box in which the cell lies.
        holders_C: Which set of holders it has, a number of `holders`.
        first_CD: First index of the cell.
        end_CD: The index after its last.
        holders: Sets of kinds of sources, each in ascending order.
        is_covered: Whether the cells of every wanted box make it up.
    """

    wanted_C: Integers
    holders_C: Integers
    first_CD: Integers
    end_CD: Integers
    holders: Sequence[Integers]
    is_covered: bool


def cells(kind_S: Integers, first_SD: Integers, end_SD: Integers, first_TD: Integers, end_TD: Integers) -> Cells:
    """Cut the wanted boxes along the edges of what sources hold.

    Args:
        kind_S: Kind of the sources that hold a box.
        first_SD: First index of each of their boxes.
        end_SD: The index after its last.
        first_TD: First index of each wanted box.
        end_TD: The index after its last.
    """
    boxes, owner_S = np.unique(np.concatenate([first_SD, end_SD], axis=1), axis=0, return_inverse=True)
    owner_S = owner_S.reshape(-1)
    num_dims = first_SD.shape[1]
    first_BD, end_BD = boxes[:, :num_dims], boxes[:, num_dims:]
    holders_B = [np.unique(kind_S[owner_S == box]) for box in range(len(boxes))]
    if _are_disjoint(first_BD, end_BD):
        wanted_C, box_C = _overlapping(first_TD, end_TD, first_BD, end_BD)
        first_CD = np.maximum(first_TD[wanted_C], first_BD[box_C])
        end_CD = np.minimum(end_TD[wanted_C], end_BD[box_C])
        holders, holders_C = holders_B, box_C
    else:
        wanted_C, first_CD, end_CD, held_CB = _grid(first_TD, end_TD, first_BD, end_BD)
        patterns, holders_C = np.unique(held_CB, axis=0, return_inverse=True)
        holders_C = holders_C.reshape(-1)
        holders = [np.unique(np.concatenate([holders_B[box] for box in np.flatnonzero(row)])) for row in patterns]
    found = np.bincount(wanted_C, (end_CD - first_CD).prod(1), minlength=len(first_TD))
    return Cells(
        wanted_C=wanted_C,
        holders_C=holders_C,
        first_CD=first_CD,
        end_CD=end_CD,
        holders=holders,
        is_covered=bool((found == (end_TD - first_TD).prod(1)).all()),
    )


def _overlapping(
    first_TD: Integers, end_TD: Integers, first_BD: Integers, end_BD: Integers
) -> tuple[Integers, Integers]:
    """Pairs of a wanted box and a held one that have an element in common."""
    common = (np.minimum(end_TD[:, None], end_BD) > np.maximum(first_TD[:, None], first_BD)).all(2)
    wanted, box = np.nonzero(common)
    return wanted, box


def _are_disjoint(first_BD: Integers, end_BD: Integers) -> bool:
    wanted, _ = _overlapping(first_BD, end_BD, first_BD, end_BD)
    return len(wanted) == len(first_BD)


def _grid(
    first_TD: Integers, end_TD: Integers, first_BD: Integers, end_BD: Integers
) -> tuple[Integers, Integers, Integers, npt.NDArray[np.bool_]]:
    """Cells of the grid of all edges within each wanted box, and which boxes hold them; cells that none holds go."""
    wanted, firsts, ends, helds = [], [], [], []
    for index, (first_D, end_D) in enumerate(zip(first_TD, end_TD, strict=True)):
        lows, highs = [], []
        for dim in range(len(first_D)):
            edges = np.concatenate([first_BD[:, dim], end_BD[:, dim], [first_D[dim], end_D[dim]]])
            edges = np.unique(edges.clip(first_D[dim], end_D[dim]))
            lows.append(edges[:-1])
            highs.append(edges[1:])
        low_CD = np.stack([axis.reshape(-1) for axis in np.meshgrid(*lows, indexing="ij")], axis=1)
        high_CD = np.stack([axis.reshape(-1) for axis in np.meshgrid(*highs, indexing="ij")], axis=1)
        held: npt.NDArray[np.bool_] = np.all((first_BD <= low_CD[:, None]) & (high_CD[:, None] <= end_BD), axis=2)
        kept = np.any(held, axis=1)
        wanted.append(np.full(int(kept.sum()), index))
        firsts.append(low_CD[kept])
        ends.append(high_CD[kept])
        helds.append(held[kept])
    return np.concatenate(wanted), np.concatenate(firsts), np.concatenate(ends), np.concatenate(helds)
