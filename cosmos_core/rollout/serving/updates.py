"""Weights in place: what the engine holds, an update being written, and its commit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.quantization import copy_exactly
from cosmos_core.weights.shards import dtype_name


def whole_layout(tensors: Mapping[str, torch.Tensor]) -> list[tuple[TensorSlice, str]]:
    """Every tensor as one slice, with its dtype's name."""
    return [(slices.whole(name, tuple(tensor.shape)), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]


class Update:
    """What is written between `begin_update` and `commit_update`."""

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = version
        self._tensors = tensors
        self._pieces: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}

    def write_to(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice for a rank.

        Raises:
            WeightSyncError: There is no such rank, or as `write` says.
        """
        if rank != 0:
            raise WeightSyncError(f"rank {rank} does not exist: this engine has rank 0 only")
        self.write(piece, data)

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice.

        Raises:
            WeightSyncError: It is not a slice of a tensor held here, or `data` has another shape.
        """
        self._check_slice(piece, data)
        self._pieces.setdefault(piece.name, []).append((piece, data))

    def _check_slice(self, piece: TensorSlice, data: torch.Tensor) -> None:
        tensor = self._tensors.get(piece.name)
        if tensor is None:
            raise WeightSyncError(f"update to version {self.version}: {piece.name!r} is not a tensor of this model")
        if tuple(data.shape) != piece.shape:
            raise WeightSyncError(f"{piece.name}: data of shape {tuple(data.shape)} for a slice of {piece.shape}")
        inside = len(piece.start) == len(piece.shape) == tensor.ndim and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(piece.start, piece.shape, tensor.shape, strict=True)
        )
        if not inside:
            raise WeightSyncError(
                f"{piece.name}: a slice of {piece.shape} at {piece.start} is not in a tensor of {tuple(tensor.shape)}"
            )

    def check(self) -> None:
        """Raise WeightSyncError unless every element of every tensor was written."""
        lacking = [
            name
            for name, tensor in self._tensors.items()
            if not covers([piece for piece, _ in self._pieces.get(name, ())], tuple(tensor.shape))
        ]
        if lacking:
            raise WeightSyncError(
                f"update to version {self.version}: {len(lacking)} of {len(self._tensors)} tensors are not wholly "
                f"written, the first is {lacking[0]!r}"
            )

    def pieces(self) -> Iterator[tuple[TensorSlice, torch.Tensor]]:
        """What was written, in any order."""
        for pieces in self._pieces.values():
            yield from pieces

    def close(self) -> None:
        """Let go of what was written. Idempotent."""
        self._pieces.clear()

    def apply(self) -> None:
        """Copy everything in."""
        with torch.no_grad():
            for name, pieces in self._pieces.items():
                for piece, data in pieces:
                    box = tuple(
                        slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True)
                    )
                    copy_exactly(self._tensors[name][box], data)


def covers(pieces: Sequence[TensorSlice], shape: tuple[int, ...]) -> bool:
    """Whether boxes cover a tensor: on the grid of their edges, every cell must be in one of them."""
    if any(piece.shape == shape for piece in pieces) or 0 in shape:
        return True
    if not pieces:
        return False
    edges = [
        sorted({0, whole, *itertools.chain.from_iterable((p.start[d], p.start[d] + p.shape[d]) for p in pieces)})
        for d, whole in enumerate(shape)
    ]
    covered = np.zeros([len(marks) - 1 for marks in edges], bool)
    for piece in pieces:
        covered[
            tuple(
                slice(marks.index(start), marks.index(start + size))
                for marks, start, size in zip(edges, piece.start, piece.shape, strict=True)
            )
        ] = True
    return bool(covered.all())
