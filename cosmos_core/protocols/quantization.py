"""The formats in which rollout replicas may hold weight matrices: how many bits, and which elements share a scale.

A matrix is [..., rows, columns]: of a linear layer [out, in], of stacked experts [experts, out, in]. Scales run along
the columns, over which a product sums. Elements are rounded to the nearest code, ties to even; what is beyond the
largest code becomes it. Whatever does not fill a block or a byte at the end of a row counts as zeros there.

| format | codes | scale of a block | block | scale of a matrix |
|---|---|---|---|---|
| fp8 | e4m3, a byte each | float32: largest element / 448 | a row | |
| mxfp8 | e4m3, a byte each | e8m0: 2^(floor(log2(largest element)) - 8) | 32 columns | |
| mxfp4 | e2m1, two a byte | e8m0: 2^(floor(log2(largest element)) - 2) | 32 columns | |
| nvfp4 | e2m1, two a byte | e4m3: largest element / 6 / the matrix's scale | 16 columns | float32: largest / 2688 |

Of two 4-bit codes in a byte, the lower half is the one of the even column.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3; NVIDIA, arXiv:2509.25149, appendix C
(NVFP4). Deviations: a scale is never below the smallest normal number of its type (2^-127 of e8m0), but 0 for nvfp4's
blocks of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import attrs

Quantization: TypeAlias = Literal["none", "fp8", "mxfp8", "mxfp4", "nvfp4"]

SCALE: Final = "::scale"
"""Suffix of the tensor of a matrix's block scales, [..., rows, blocks]."""
MATRIX_SCALE: Final = "::matrix_scale"
"""Suffix of the tensor of the scales of whole matrices, [..., 1, 1]."""

_ITEM_SIZES: Final = {"uint8": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "float32": 4}


@attrs.frozen(kw_only=True)
class Format:
    """A format.

    Attributes:
        name: Its name in recipes.
        codes: torch dtype of the tensor of codes.
        per_byte: Codes in a byte.
        block: Columns that share a scale; None for all of a row.
        scale: torch dtype of block scales.
        has_matrix_scale: Whether each matrix has a scale besides.
    """

    name: Quantization
    codes: str
    per_byte: int
    block: int | None
    scale: str
    has_matrix_scale: bool = False

    def block_of(self, columns: int) -> int:
        """Columns that share a scale, in a row of so many."""
        return max(1, columns if self.block is None else self.block)

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors of a matrix: dtype and shape by canonical name; the codes have the matrix's own.

        Args:
            name: Canonical name of the matrix.
            shape: Its shape, [..., rows, columns].
        """
        *leading, columns = shape
        found = {
            name: (self.codes, (*leading, -(-columns // self.per_byte))),
            f"{name}{SCALE}": (self.scale, (*leading, -(-columns // self.block_of(columns)))),
        }
        if self.has_matrix_scale:
            found[f"{name}{MATRIX_SCALE}"] = ("float32", (*shape[:-2], 1, 1))
        return found

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix in this format."""
        return sum(_ITEM_SIZES[dtype] * math.prod(size) for dtype, size in self.tensors("", shape).values())


FORMATS: Final[Mapping[Quantization, Format]] = {
    each.name: each
    for each in (
        Format(name="fp8", codes="float8_e4m3fn", per_byte=1, block=None, scale="float32"),
        Format(name="mxfp8", codes="float8_e4m3fn", per_byte=1, block=32, scale="float8_e8m0fnu"),
        Format(name="mxfp4", codes="uint8", per_byte=2, block=32, scale="float8_e8m0fnu"),
        Format(name="nvfp4", codes="uint8", per_byte=2, block=16, scale="float8_e4m3fn", has_matrix_scale=True),
    )
}
"""Every format but `none`, by name."""
