"""A replica's own copy of what it has loaded, of which a publisher's changes make the next version."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights.shards import EngineLayout, TensorFacts
from cosmos_core.weights.snapshot import Snapshot, blank_snapshot
from cosmos_core.weights.wire import Origin

_LOG: Final = logging.getLogger(__name__)


class Base:
    """One copy of the weights in host memory, written over by each version as it arrives; used by one thread at a time.

    Changes are values, not differences: written over a copy that has some of them already they make the same. So a
    version may be made of a copy that it is being written into. Until all of it is loaded and attested, no other is:
    after an attempt that failed, for whatever reason, all of the next comes.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Hold nothing.

        Args:
            directory: Where the copy lies; shared memory if absent.
        """
        self._directory: Final = directory
        self._snapshot: Snapshot | None = None
        self._facts: dict[str, TensorFacts] = {}
        self._layout: EngineLayout = {}
        self._origin: Origin | None = None

    @property
    def origin(self) -> Origin | None:
        """The version that it holds, all of it and attested; None if there is none."""
        return self._origin

    def holds(self, piece: TensorSlice, facts: TensorFacts) -> bool:
        """Whether it has a slice of a tensor with this dtype and shape."""
        if self._snapshot is None or self._facts.get(piece.name) != facts:
            return False
        return self._snapshot.finds(piece) is not None

    def read(self, piece: TensorSlice) -> memoryview:
        """Bytes of a slice that it holds, which the next write may change."""
        found = None if self._snapshot is None else self._snapshot.read(piece)
        assert found is not None, piece
        return found

    def begin(self, version: int, layout: EngineLayout) -> None:
        """A version begins to arrive; from here on the copy is of no version until `confirm`.

        Args:
            version: Weight version.
            layout: What each rank of the engine holds. Where there is no room for it, the log says so, nothing is kept,
                and the next version comes whole.
        """
        self._origin = None
        if self._snapshot is not None and layout == self._layout:
            return
        self.close()
        try:
            self._snapshot = blank_snapshot(version, layout, directory=self._directory)
        except WeightSyncError as error:
            _LOG.warning("of weights version %d no copy is kept, the next one comes whole: %s", version, error)
            return
        self._layout = layout
        self._facts = {entry.name: entry.facts for entry in self._snapshot.entries}

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Keep a slice that arrived."""
        if self._snapshot is not None:
            self._snapshot.write(piece, data)

    def confirm(self, version: int, digest: str) -> None:
        """All of a version has been written, and what was loaded of it has this digest."""
        if self._snapshot is not None:
            self._origin = Origin(version=version, digest=digest)

    def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        self._origin = None
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
