"""Where a rank runs, and which source is nearer to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

DISTANCES: Final = ("process", "host", "rack", "anywhere")
"""What two ranks have in common, nearest first; a distance is a place in this list."""


@attrs.frozen(kw_only=True)
class Place:
    """Labels of where a rank runs. Equal labels mean the same place; an empty one is not known, and equals none.

    Attributes:
        process: Unique over all hosts.
        host: Unique over all racks.
        rack: Or the switch, or whatever has a faster network inside than outside.
    """

    process: str = ""
    host: str = ""
    rack: str = ""


def distances(sources: Sequence[Place], targets: Sequence[Place]) -> npt.NDArray[np.int8]:
    """How far each source is from each target: places in `DISTANCES`, of shape (sources, targets)."""
    far = np.full((len(sources), len(targets)), DISTANCES.index("anywhere"), np.int8)
    for distance, label in reversed(list(enumerate(DISTANCES[:-1]))):
        codes: dict[str, int] = {}
        ours = [_code(codes, getattr(place, label), -1) for place in sources]
        theirs = [_code(codes, getattr(place, label), -2) for place in targets]
        far[np.equal.outer(np.array(ours, np.int64), np.array(theirs, np.int64))] = distance
    return far


def _code(codes: dict[str, int], label: str, unknown: int) -> int:
    return codes.setdefault(label, len(codes)) if label else unknown
