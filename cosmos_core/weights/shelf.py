"""What a receiver reads itself, without asking a publisher for each slice: a mapped file, or a stored part."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices, wire
from cosmos_core.weights.snapshot import view
from cosmos_core.weights.source import Arrived, Wanted


class Shelf(Protocol):
    """Slices within reach."""

    def read(self, pieces: Sequence[Wanted]) -> Iterator[Arrived]:
        """Yield each of these slices, which it holds.

        Raises:
            WeightSyncError: What it holds is damaged or gone.
        """
        ...


class MappedShelf:
    """The file of a publisher on this host; slices are views of it.

    Args:
        manifest: What the file holds.
        buffer: The file.
    """

    def __init__(self, manifest: wire.Manifest, buffer: mmap.mmap) -> None:
        self._manifest: Final = manifest
        self._buffer: Final = buffer

    def read(self, pieces: Sequence[Wanted]) -> Iterator[Arrived]:
        """Views of the mapping, which live as long as it does."""
        tensors: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}
        for entry in self._manifest.entries:
            tensors.setdefault(entry.name, []).append((entry.piece, view(self._buffer, entry)))
        for rank, piece in pieces:
            held, tensor = next((h, t) for h, t in tensors[piece.name] if slices.contains(h, piece))
            yield rank, piece, tensor[slices.within(piece, held)]
