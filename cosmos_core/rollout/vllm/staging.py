"""Slices on their way to vLLM's processes: put once into memory that these map.

The memory has no name in a file system (`memfd_create`), so that nothing is left of it whatever ends the processes. It
is found by the descriptor of the process that made it.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from pathlib import Path
from typing import Final

import attrs
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.weights.shards import dtype_name, torch_dtype

_ALIGNMENT: Final = 64
_LEAST_BYTES: Final = 1 << 20


@attrs.frozen
class Place:
    """Where the values of a slice are.

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
            size = _aligned(data.nbytes)
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
        self._fd: Final = os.memfd_create("cosmos-vllm-weights", os.MFD_CLOEXEC)
        try:
            # Reserves the memory: without it, a write that finds none would kill the process.
            os.posix_fallocate(self._fd, 0, size_bytes)
            self._buffer: Final = mmap.mmap(self._fd, size_bytes)
        except OSError as error:
            os.close(self._fd)
            raise WeightSyncError(
                f"no memory for {size_bytes:,} bytes of weights on their way to vLLM's processes ({error.strerror}); "
                "free some, or split the model over more ranks"
            ) from error
        self._finalizer: Final = weakref.finalize(self, os.close, self._fd)
        self._bytes: Final = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._path: Final = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._used = 0

    def put(self, data: torch.Tensor) -> Place | None:
        """A place in here; None if there is no room."""
        first, size = self._used, data.nbytes
        if first + size > len(self._bytes):
            return None
        if size:
            self._bytes[first : first + size].copy_(data.contiguous().view(-1).view(torch.uint8))
        self._used = first + _aligned(size)
        return Place(self._path, first, dtype_name(data.dtype), tuple(data.shape))

    def close(self) -> None:
        self._finalizer()


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
                    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise WeightSyncError(
                    f"the weights that were put at {place.path} cannot be read ({error.strerror}): the process that "
                    "put them must live, be this user's, and be visible in /proc"
                ) from error
            self._mapped[place.path] = torch.frombuffer(buffer, dtype=torch.uint8)
        dtype = torch_dtype(place.dtype)
        size = math.prod(place.shape) * dtype.itemsize
        return self._mapped[place.path][place.offset : place.offset + size].view(dtype).view(place.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
