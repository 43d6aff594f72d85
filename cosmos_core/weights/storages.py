"""The memory of tensors, given up while whoever has them sleeps: tensors and their views stay, with nothing in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from cosmos_core.errors import AttestationError, WeightSyncError
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.staging import HostMemory, copies_itself, page_lock


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
        device: That one.
        nbytes: What they take while they are there.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Find them; tensors elsewhere, and memory that others own, such as a mapped file, are left alone."""
        self.device: Final = device
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
        give_back(self.device)

    def allocate(self) -> None:
        """Take as much memory; what is in it is to be written.

        Raises:
            WeightSyncError: There is no room for it any more.
        """
        try:
            for storage, size in self._storages:
                storage.resize_(size)
        except torch.OutOfMemoryError as error:
            raise WeightSyncError(
                f"{self.device} has no room for the {self.nbytes:,} bytes that wake there ({error}): what others keep "
                "there while they sleep is too much; lower rollout.engine.options.memory_share, if the engine has it, "
                "or policy.micro_batch_units"
            ) from error

    def contents(self) -> dict[str, torch.Tensor]:
        """Each storage as one tensor of numbers, by its place."""
        found = {}
        for place, (storage, size) in enumerate(self._storages):
            dtype = torch.int64 if size % 8 == 0 else torch.uint8
            whole = torch.empty(0, dtype=dtype, device=storage.device)
            found[str(place)] = whole.set_(storage, 0, (size // dtype.itemsize,), (1,))
        return found


class Sleeper:
    """Keeps what storages hold while they are given up: in page-locked memory or, of a CPU, in a file without a name.

    Args:
        folder: Where the file lies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        self._memory: HostMemory | None = None
        self._kept: tuple[Storages, Storages, str] | None = None

    def sleep(self, storages: Storages, besides: Storages) -> None:
        """Copy what storages hold, and give them up; of what is `besides`, nothing is kept.

        Raises:
            WeightSyncError: There is no room for it.
        """
        besides.free()
        contents = storages.contents()
        self._kept = storages, besides, digest_of(contents)
        for held, kept in self._places(storages, contents):
            kept.copy_(held, non_blocking=True)
        storages.free()
        if self._memory is not None and not copies_itself(storages.device):
            self._memory.buffer.madvise(mmap.MADV_DONTNEED)

    def wake(self) -> None:
        """Take the memory again, with what was in it.

        Raises:
            AttestationError: That is not what it was.
        """
        assert self._kept is not None, "it sleeps"
        storages, besides, digest = self._kept
        storages.allocate()
        besides.allocate()
        contents = storages.contents()
        for held, kept in self._places(storages, contents):
            held.copy_(kept, non_blocking=True)
        if (found := digest_of(contents)) != digest:
            raise AttestationError(
                f"what slept in the machine's memory woke with the digest {found}, and had {digest}: that memory, or "
                "the way to it, is bad"
            )

    def _places(
        self, storages: Storages, contents: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each storage, and its place in the memory where it is kept, as bytes."""
        if not storages.nbytes:
            return
        if self._memory is None or len(self._memory.buffer) != storages.nbytes:
            self._memory = self._room_for(storages)
        sizes = [each.nbytes for each in contents.values()]
        whole = torch.frombuffer(self._memory.buffer, dtype=torch.uint8)
        yield from zip((each.view(torch.uint8) for each in contents.values()), torch.split(whole, sizes), strict=True)

    def _room_for(self, storages: Storages) -> HostMemory:
        if copies_itself(storages.device):
            memory = HostMemory(storages.nbytes)
            page_lock(memory, storages.device)
            return memory
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, storages.nbytes)
                return HostMemory(storages.nbytes, file.fileno())
        except OSError as error:
            raise WeightSyncError(
                f"no room in {self._folder} for the {storages.nbytes:,} bytes that sleep there (rollout.placement = "
                f"'colocated' on a CPU): {error.strerror}; free space, or set run.output_dir"
            ) from error
