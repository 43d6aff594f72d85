"""How what a processor makes of images goes side by side in a packed row.

A row is to the model as one text with the images of all its documents. So a processor is asked once what it makes of
two images of different sizes, apart and together, and each of its arrays is joined in the way that gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cosmos_core.errors import PluginIncompatibleError

Arrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]
"""What a processor makes of images, by name."""


def find_joins(first: Arrays, second: Arrays, both: Arrays, name: str) -> Mapping[str, int]:
    """The dim along which each array is joined; in the others, smaller ones are filled up with zeros at the end.

    Args:
        first: Of one image.
        second: Of another, of another size.
        both: Of a text with the first and then the second.
        name: Of the processor, for errors.

    Raises:
        PluginIncompatibleError: An array of the two is not that of each, joined.
    """
    found = {}
    for key, expected in both.items():
        parts = [first[key], second[key]]
        dims = [dim for dim in range(expected.ndim) if _equal(join(parts, dim), expected)]
        if not dims:
            raise PluginIncompatibleError(
                f"{name} makes {key!r} of shape {expected.shape} of two images, and of each alone "
                f"{parts[0].shape} and {parts[1].shape}: that is not theirs side by side, so rows cannot be packed"
            )
        found[key] = dims[0]
    return found


def join(parts: Sequence[npt.NDArray[np.generic]], dim: int) -> npt.NDArray[np.generic]:
    """Arrays along a dim, filled up with zeros at the end of the others."""
    sizes = np.max([part.shape for part in parts], axis=0)
    lacks = [[0 if at == dim else sizes[at] - own for at, own in enumerate(part.shape)] for part in parts]
    filled = [np.pad(part, [(0, lack) for lack in lacking]) for part, lacking in zip(parts, lacks, strict=True)]
    return np.concatenate(filled, axis=dim)


def _equal(found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> bool:
    return found.shape == expected.shape and bool((found == expected).all())
