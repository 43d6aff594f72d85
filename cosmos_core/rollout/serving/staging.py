"""Memory for weights on their way to other processes of this machine: written here, mapped there.

It has no name in a file system (`memfd_create`), so that nothing is left of it whatever ends the processes. Others get
its descriptor, or find it by that of the process that made it.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from typing import Final

import torch

from cosmos_core.errors import WeightSyncError

_ALIGNMENT: Final = 64


class StagedMemory:
    """Memory of this process that others may map until it is closed; what they have mapped stays theirs.

    Attributes:
        descriptor: Of the memory, while it is not closed.
        size: Bytes, one at least.
        bytes: All of it, uint8 [size]; to be used until it is closed, and longer where it is referenced.
    """

    def __init__(self, size_bytes: int, receiver: str) -> None:
        """Take the memory.

        Args:
            size_bytes: How much.
            receiver: Who is to read it, for errors.

        Raises:
            WeightSyncError: There is none, or no descriptor for it.
        """
        self.size: Final = max(1, size_bytes)
        descriptor = -1
        try:
            descriptor = os.memfd_create("cosmos-weights")
            # Reserves the memory: without it, a write that finds none would kill the process.
            os.posix_fallocate(descriptor, 0, self.size)
            buffer = mmap.mmap(descriptor, self.size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise WeightSyncError(
                f"cannot take {self.size:,} bytes of memory for weights on their way to {receiver} "
                f"({error.strerror}); free memory or descriptors, or split the model over more ranks"
            ) from error
        self.descriptor: Final = descriptor
        self.bytes: Final = torch.frombuffer(buffer, dtype=torch.uint8)
        self._finalizer: Final = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Let the memory go. Idempotent."""
        self._finalizer()


def map_staged(descriptor: int) -> torch.Tensor:
    """Memory of another process, uint8 [size]: private, so that a write here would change nothing there.

    Raises:
        WeightSyncError: It cannot be mapped.
    """
    try:
        buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"the memory that weights were put in cannot be mapped: {error}") from error
    return torch.frombuffer(buffer, dtype=torch.uint8)


def region(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The contiguous tensor that begins at a byte of memory; the offset is one of `aligned`."""
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


def aligned(size_bytes: int) -> int:
    """Bytes after which a tensor of any dtype may begin."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
