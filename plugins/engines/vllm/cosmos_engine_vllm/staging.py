"""Slices on their way to vLLM's processes: put once into memory that these map.

They find it by the descriptor of the process that made it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import attrs
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.weights.quantization import copy_exactly
from cosmos_core.weights.shards import dtype_name, torch_dtype
from cosmos_engine_vllm.ranks import StagedMemory, aligned, map_staged, region

_LEAST_BYTES: Final = 1 << 20


@attrs.frozen
class Place:
    """The place of a slice's values.

    Attributes:
        path: Of the memory, while the process that made it keeps it.
        offset: Of the first byte.
        dtype: Name of their dtype.
        shape: Of the slice; values are contiguous.
    """

    path: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Staging:
    """Memory of this process that others on the machine may read until it is closed."""

    def __init__(self, size_bytes: int) -> None:
        """Nothing is taken yet.

        Args:
            size_bytes: What is expected in all; more is taken where slices are written again.
        """
        self._expected: Final = max(_LEAST_BYTES, size_bytes)
        self._segments: Final[list[_Segment]] = []

    def put(self, data: torch.Tensor) -> Place:
        """Copy a slice; `data` is free again.

        Raises:
            WeightSyncError: There is no memory for it.
        """
        place = self._segments[-1].put(data) if self._segments else None
        if place is None:
            size = aligned(data.nbytes)
            self._segments.append(_Segment(max(size, self._expected if not self._segments else _LEAST_BYTES)))
            place = self._segments[-1].put(data)
        assert place is not None
        return place

    def close(self) -> None:
        """Let the memory go; who has mapped it may go on reading. Idempotent."""
        while self._segments:
            self._segments.pop().close()


class _Segment:
    def __init__(self, size_bytes: int) -> None:
        self._memory: Final = StagedMemory(size_bytes, "vLLM's processes")
        self._path: Final = f"/proc/{os.getpid()}/fd/{self._memory.descriptor}"
        self._used = 0

    def put(self, data: torch.Tensor) -> Place | None:
        """A place in here; None if there is no room."""
        first = self._used
        if first + data.nbytes > self._memory.size:
            return None
        copy_exactly(region(self._memory.bytes, first, data.dtype, tuple(data.shape)), data)
        self._used = first + aligned(data.nbytes)
        return Place(self._path, first, dtype_name(data.dtype), tuple(data.shape))

    def close(self) -> None:
        self._memory.close()


class Reading:
    """Reads slices that another process put."""

    def __init__(self) -> None:
        self._mapped: Final[dict[str, torch.Tensor]] = {}

    def get(self, place: Place) -> torch.Tensor:
        """The values, in the memory of the other process: they are not to be written to.

        Raises:
            WeightSyncError: The memory is not there any more.
        """
        if place.path not in self._mapped:
            try:
                with Path(place.path).open("rb") as file:
                    self._mapped[place.path] = map_staged(file.fileno())
            except OSError as error:
                raise WeightSyncError(
                    f"the weights that were put at {place.path} cannot be read ({error.strerror}): the process that "
                    "put them must live, be this user's, and be visible in /proc"
                ) from error
        return region(self._mapped[place.path], place.offset, torch_dtype(place.dtype), place.shape)
