"""Matrices that a checkpoint holds in few bits, as their makers publish them, read as bfloat16.

| `quant_method` | matrix | codes | scales |
|---|---|---|---|
| `fp8` | `X` [..., rows, columns] | `X`, e4m3, as the matrix | `X_scale_inv`, float, one for each block of 128 x 128 |
| `mxfp4` | `X` [..., 32 G, rows] | `X_blocks` [..., rows, G, 16], two e2m1 a byte | `X_scales` [..., rows, G], e8m0 |

Values are those of the checkpoint as converted to bfloat16, bit for bit. Each is the product of its code and
its scale, so any part of a matrix is read alone, with the blocks or groups that it touches.

Source: arXiv:2412.19437 section 3.3 (fp8 in blocks); OCP Microscaling Formats (MX) Specification v1.0 (MXFP4).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import attrs
import torch

from cosmos_core.errors import CheckpointError
from cosmos_core.models.weights.loading import BLOCK, FLOATS, Stored
from cosmos_core.protocols.quantization import FORMATS, SCALE
from cosmos_core.weights.quantization import dequantise_blocks, dequantised_rows

_READ_AS: Final = "BF16"
_MXFP4: Final = FORMATS["mxfp4"]
_GROUP: Final = 32
_PACKED: Final = "_blocks"

Index: TypeAlias = tuple[slice, ...]
Read: TypeAlias = Callable[[Stored, Index], torch.Tensor]
"""Gives a part of a tensor in a file; it is valid until the next call."""


@attrs.frozen(kw_only=True)
class Quantised(Stored, ABC):
    """A matrix in few bits; its name, shape and dtype are those with which it is read.

    Attributes:
        codes: The tensor of codes.
        scales: The tensor of scales; None if the checkpoint has none.
        scales_name: Its name.
    """

    codes: Stored
    scales: Stored | None
    scales_name: str

    def check_float(self) -> None:
        """Refuse a matrix without its scales, or with others than it needs."""
        shape, dtypes = self._expected()
        if self.scales is None:
            raise CheckpointError(
                f"{self.file}: {self.codes.name} is quantised, and the checkpoint lacks its scales, {self.scales_name}"
            )
        found = self.scales
        if found.shape != shape or found.dtype not in dtypes:
            raise CheckpointError(
                f"{found.file}: {found.name} has shape {found.shape} and dtype {found.dtype}; the scales of "
                f"{self.codes.name}, of shape {self.codes.shape}, have shape {shape} and dtype {' or '.join(dtypes)}"
            )

    @abstractmethod
    def values(self, read: Read, index: Index) -> torch.Tensor:
        """A part of the matrix, bfloat16."""

    @abstractmethod
    def _expected(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The shape and the possible dtypes of the scales."""

    def _scales(self, read: Read, index: Index) -> torch.Tensor:
        assert self.scales is not None, "they have been checked"
        return read(self.scales, index).clone()


@attrs.frozen(kw_only=True)
class _Blocked(Quantised):
    def values(self, read: Read, index: Index) -> torch.Tensor:
        *leading, rows, columns = index
        blocks = (slice(each.start // BLOCK, math.ceil(each.stop / BLOCK)) for each in (rows, columns))
        scales = self._scales(read, (*leading, *blocks))
        first = rows.start % BLOCK, columns.start % BLOCK
        return dequantise_blocks(read(self.codes, index), scales, BLOCK, first, FLOATS[_READ_AS])

    def _expected(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        *leading, rows, columns = self.shape
        return (*leading, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)), tuple(FLOATS)


@attrs.frozen(kw_only=True)
class _Grouped(Quantised):
    def values(self, read: Read, index: Index) -> torch.Tensor:
        *leading, inner, rows = index
        groups = slice(inner.start // _GROUP, math.ceil(inner.stop / _GROUP))
        scales = self._scales(read, (*leading, rows, groups)).view(torch.float8_e8m0fnu)
        codes = read(self.codes, (*leading, rows, groups, slice(None))).flatten(-2)
        *outer, num_rows, num_groups = scales.shape
        columns = slice(inner.start - groups.start * _GROUP, inner.stop - groups.start * _GROUP)
        found = torch.empty((*outer, columns.stop - columns.start, num_rows), dtype=FLOATS[_READ_AS])
        # One after another and few rows at once, so that what is turned round is still in the caches.
        for matrix, *held in zip(*(each[None].flatten(0, -3) for each in (found, codes, scales)), strict=True):
            tensors = dict(zip(("", SCALE), held, strict=True))
            for some, values in dequantised_rows(_MXFP4, "", tensors, num_groups * _GROUP):
                matrix[:, some] = values[:, columns].T
        return found

    def _expected(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return self.codes.shape[:-1], ("U8",)


def joined(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a checkpoint, each quantised matrix as one by its own name, without its scales."""
    found = {each.name: each for each in (_joined(codes, stored) for codes in stored.values())}
    scales = {each.scales_name for each in found.values() if isinstance(each, Quantised)}
    return {name: each for name, each in found.items() if name not in scales}


def _joined(codes: Stored, stored: Mapping[str, Stored]) -> Stored:
    name, shape = codes.name, codes.shape
    kind: type[Quantised]
    if codes.dtype == "F8_E4M3" and len(shape) > 1:
        kind, scales = _Blocked, f"{name}_scale_inv"
    elif codes.dtype == "U8" and name.endswith(_PACKED) and len(shape) > 2 and shape[-1] == _GROUP // _MXFP4.per_byte:
        name = name.removesuffix(_PACKED)
        *leading, rows, groups, _ = shape
        kind, scales, shape = _Grouped, f"{name}_scales", (*leading, groups * _GROUP, rows)
    else:
        return codes
    return kind(
        name=name,
        file=codes.file,
        shape=shape,
        dtype=_READ_AS,
        codes=codes,
        scales=stored.get(scales),
        scales_name=scales,
    )
