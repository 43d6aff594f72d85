"""The memory of tensors, given up while whoever has them sleeps: tensors and their views stay, with nothing in them."""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from cosmos_core.errors import AttestationError
from cosmos_core.weights.digest import digest_of

_PIECE_BYTES: Final = 1 << 28
"""Pinned memory is handed out in powers of two."""


def give_back(device: torch.device) -> None:
    """Give memory that this process holds and does not use back to its device, for others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Storages:
    """The storages of some tensors on a device, each once.

    Attributes:
        nbytes: What they take while they are there.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Find them; tensors elsewhere, and memory that others own, such as a mapped file, are left alone."""
        self._device: Final = device
        local = [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in tensors]
        found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in local}
        self._storages: Final = [
            (each, each.nbytes()) for each in found.values() if each.device.type == device.type and each.resizable()
        ]
        self.nbytes: Final = sum(size for _, size in self._storages)

    def free(self) -> None:
        """Give the memory up; what was in it is lost."""
        for storage, _ in self._storages:
            storage.resize_(0)
        give_back(self._device)

    def allocate(self) -> None:
        """Take as much memory; what is in it is to be written."""
        for storage, size in self._storages:
            storage.resize_(size)

    def contents(self) -> dict[str, torch.Tensor]:
        """Each storage as one tensor of numbers, by its place."""
        found = {}
        for place, (storage, size) in enumerate(self._storages):
            dtype = torch.int64 if size % 8 == 0 else torch.uint8
            whole = torch.empty(0, dtype=dtype, device=storage.device)
            found[str(place)] = whole.set_(storage, 0, (size // dtype.itemsize,), (1,))
        return found


class Sleeping:
    """Keeps what storages held when they were given up: in pinned memory or, of a CPU, in a file."""

    def __init__(self, storages: Storages, folder: Path) -> None:
        """Copy what they hold, and give them up; a file lies in `folder`, without a name."""
        self._storages: Final = storages
        self._file: Final = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with this
        weakref.finalize(self, self._file.close)
        self._pinned: Final[list[torch.Tensor]] = []
        contents = storages.contents()
        self._digest: Final = digest_of(contents)
        for each in contents.values():
            if each.device.type == "cpu":
                self._file.write(_memory(each))
                continue
            for part in torch.split(each, _PIECE_BYTES // each.itemsize):
                copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                self._pinned.append(copy.copy_(part, non_blocking=True))
        storages.free()

    def wake(self) -> None:
        """Take the memory again, with what was in it.

        Raises:
            AttestationError: That is not what it was.
        """
        self._storages.allocate()
        contents, pinned = self._storages.contents(), iter(self._pinned)
        self._file.seek(0)
        for each in contents.values():
            if each.device.type == "cpu":
                self._file.readinto(_memory(each))
                continue
            for part in torch.split(each, _PIECE_BYTES // each.itemsize):
                part.copy_(next(pinned), non_blocking=True)
        if (digest := digest_of(contents)) != self._digest:
            raise AttestationError(
                f"what slept in the machine's memory woke with the digest {digest}, and had {self._digest}: that "
                "memory, or the way to it, is bad"
            )


def _memory(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a tensor on a CPU; as a NumPy array it could not be given up any more."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
