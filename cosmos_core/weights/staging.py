"""Copies between a CUDA device and this machine's memory, beside the device's other work; on a CPU, plain copies.

The device copies by itself where the machine's memory is page-locked. Snapshots and checkpoints lie in memory that is,
and are written by a stream of its own; what is loaded goes through two buffers of fixed size.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

import torch

from cosmos_core.weights import slices
from cosmos_core.weights.quantization import copy_exactly

cuda: Final[Any] = torch.cuda
_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
BUFFER_BYTES: Final = 32 << 20
"""Size of a copy, and of each of the buffers through which weights are loaded."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable."""
_locked: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_reading: Final[dict[torch.device, Any]] = {}
"""The last copy begun from each device, as an event of its stream of copies."""
_streams: Final[dict[torch.device, Any]] = {}


class HostMemory:
    """Memory of this machine, to be written over and over: of its own, or a file's."""

    def __init__(self, size: int, file: int = -1) -> None:
        self.buffer: Final = mmap.mmap(file, size)


def copies_itself(device: torch.device) -> bool:
    """Tell whether a device makes copies beside its other work."""
    return device.type == "cuda"


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device that some tensors lie on; the CPU if all of them do."""
    return next((each.device for each in tensors if copies_itself(each.device)), torch.device("cpu"))


class Beside:
    """Work that a device does beside its other work, after all that it was asked for before."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._done: Any = None
        # Keeps what is read and written until it is done.
        self._work: Callable[[], None] | None = None

    def do(self, device: torch.device, work: Callable[[], None]) -> None:
        """Have it done; it may read what is there now, which may change after `settle`."""
        if not copies_itself(device):
            work()
            return
        if device not in _streams:
            _streams[device] = cuda.Stream(device)
        self._stream, self._work = _streams[device], work
        self._stream.wait_stream(cuda.current_stream(device))
        try:
            with cuda.stream(self._stream):
                work()
        except BaseException:
            self._stream.synchronize()
            raise
        self._done = _reading[device] = self._stream.record_event(cuda.Event(blocking=True))

    def wait(self) -> None:
        """Return once it is done. Idempotent."""
        if self._done is not None:
            self._done.synchronize()
            self._work = None

    def ask(self, question: Callable[[], _T]) -> _T:
        """Wait, then ask for what was made, without waiting for the device's other work."""
        self.wait()
        with nullcontext() if self._stream is None else cuda.stream(self._stream):
            return question()


def settle() -> None:
    """Have devices change nothing that is being read: what they are asked for from now on comes after."""
    while _reading:
        device, event = _reading.popitem()
        cuda.current_stream(device).wait_event(event)


def upload(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor, which lies in this machine's memory, into the first."""
    buffers: Any = None
    for target, source in copies:
        if not copies_itself(target.device):
            copy_exactly(target, source)
            continue
        if buffers is None:
            buffers = itertools.cycle([(_page_locked(BUFFER_BYTES), cuda.Event()) for _ in range(2)])
        whole = slices.whole("", tuple(source.shape))
        for piece in slices.chunks(whole, BUFFER_BYTES // source.element_size()):
            index = slices.within(piece, whole)
            part, (memory, is_free) = source[index], next(buffers)
            is_free.synchronize()
            held = memory[: part.nbytes].view(part.dtype).view(part.shape)
            copy_exactly(held, part)
            copy_exactly(target[index], held, non_blocking=True)
            cuda.current_stream(target.device).record_event(is_free)


def download(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of bytes, which lie on one device, into this machine's memory; they are there once this returns."""
    if not copies_itself(device_of(sources)):
        return [source.clone() for source in sources]
    made = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    buffers = itertools.cycle([_page_locked(BUFFER_BYTES) for _ in range(2)])
    coming = list[tuple[Any, torch.Tensor, torch.Tensor]]()

    def take(most: int) -> None:
        while len(coming) > most:
            done, place, held = coming.pop(0)
            done.synchronize()
            place.copy_(held)

    for pair in zip(made, sources, strict=True):
        for place, part in zip(*(torch.split(each, BUFFER_BYTES) for each in pair), strict=True):
            held = next(buffers)[: len(part)]
            held.copy_(part, non_blocking=True)
            coming.append((cuda.current_stream(part.device).record_event(cuda.Event(blocking=True)), place, held))
            take(1)
    take(0)
    return made


def _page_locked(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def page_lock(owner: Any, device: torch.device) -> None:
    """Have `owner.buffer`, a mapping, page-locked for as long as its owner lives, where the device's copies need it."""
    if not copies_itself(device) or owner in _locked:
        return
    address, runtime = torch.frombuffer(owner.buffer, dtype=torch.uint8).data_ptr(), cuda.cudart()
    error = int(runtime.cudaHostRegister(address, len(owner.buffer), _PORTABLE))
    if error:
        _LOG.warning("%s bytes cannot be page-locked (CUDA error %d): copies are slow", f"{len(owner.buffer):,}", error)
        with suppress(RuntimeError):
            # Whatever is launched next takes the error for its own.
            torch.zeros(1, device=device)
        return
    _locked.add(owner)
    weakref.finalize(owner, _unlock, runtime, address, os.getpid())


def _unlock(runtime: Any, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has no CUDA
        runtime.cudaHostUnregister(address)
