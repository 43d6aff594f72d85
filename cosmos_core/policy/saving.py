"""Writes checkpoints beside training: the state is copied first, then written by a thread."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import attrs
import psutil
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # its documented home
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from cosmos_core.errors import CheckpointError
from cosmos_core.policy.checkpoint import COMPLETE, Place, marker, path_of, prune
from cosmos_core.transport.messages import CheckpointFailed, CheckpointSaved

_LOG: Final = logging.getLogger(__name__)

WRITE_ERRORS: Final = (OSError, RuntimeError, ValueError, ImportError, CheckpointException)
"""What file systems and torch's writer raise; the last one is no `Exception`."""

RNG: Final = "rng"


@attrs.frozen(kw_only=True, eq=False)
class Copied:
    """A state on the CPU that nothing else writes to."""

    place: Place
    tensors: Mapping[str, torch.Tensor]


def copy_state(state: Mapping[str, torch.Tensor], place: Place) -> Copied:
    """Copy a trainer's tensors, and the random state of this process, to the CPU."""
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    tensors[RNG] = torch.get_rng_state()
    return Copied(place=place, tensors=tensors)


def write_checkpoint(url: str, copied: Copied) -> str:
    """Write a checkpoint so that it is there completely or not at all; its path.

    On a local disk the folder is written under another name and renamed; elsewhere the marker is written last.

    Raises:
        CheckpointError: It cannot be written; what was written of it is removed.
    """
    path = path_of(url, copied.place.step)
    try:
        files, root = url_to_fs(path)
        if isinstance(files, LocalFileSystem):
            _write_local(Path(root), copied)
        else:
            _write_remote(files, root, path, copied)
    except WRITE_ERRORS as error:
        raise CheckpointError(f"no checkpoint at {path}: {_reason(error)}") from error
    return path


class CheckpointSaver:
    """Saves one checkpoint at a time on a thread.

    Args:
        url: Folder of the checkpoints.
        keep: Newest ones to keep.
        report: Told of each outcome, on the thread.
    """

    def __init__(self, url: str, keep: int, report: Callable[[CheckpointSaved | CheckpointFailed], None]) -> None:
        self._url = url
        self._keep = keep
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, state: Mapping[str, torch.Tensor], place: Place) -> None:
        """Copy the state and write it in the background; waits for the checkpoint before, if it is still written."""
        self.wait()
        self._writing = self._thread.submit(self._save, copy_state(state, place))

    def check(self) -> None:
        """Raise what went wrong in the background besides the writing itself, which is reported.

        Unseen, it would leave the controller waiting for a checkpoint that nobody writes.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written; raises as `check` does."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _save(self, copied: Copied) -> None:
        step = copied.place.step
        try:
            path = write_checkpoint(self._url, copied)
        except CheckpointError as error:
            _LOG.warning("%s; training goes on", error)
            self._report(CheckpointFailed(step=step, reason=str(error)))
            return
        self._report(CheckpointSaved(step=step, path=path))
        try:
            prune(self._url, self._keep)
        except CheckpointError as error:
            _LOG.warning("old checkpoints were not removed: %s", error)


def _write_local(final: Path, copied: Copied) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    owner = f"{platform.node()}@{os.getpid()}"
    partial, replaced = (final.with_name(f".{name}@{owner}") for name in (final.name, f"{final.name}-replaced"))
    _sweep(final.parent)
    try:
        _write_tensors(str(partial), copied.tensors)
        (partial / COMPLETE).write_bytes(marker(copied.place))
        _sync(partial / COMPLETE)
        _sync(partial)
        if final.exists():
            # Of the same step, before the run was resumed. Removing it takes time; renaming leaves no gap to speak of.
            final.rename(replaced)
        partial.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what processes of this machine that are gone left half written."""
    for partial in folder.glob(f".step-*@{platform.node()}@*"):
        if not psutil.pid_exists(int(partial.name.rpartition("@")[2])):
            shutil.rmtree(partial, ignore_errors=True)


def _write_remote(files: Any, root: str, path: str, copied: Copied) -> None:
    if files.exists(f"{root}/{COMPLETE}"):
        files.rm_file(f"{root}/{COMPLETE}")
    if files.exists(root):
        files.rm(root, recursive=True)
    _write_tensors(path, copied.tensors)
    files.pipe_file(f"{root}/{COMPLETE}", marker(copied.place))


def _write_tensors(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        save(dict(tensors), storage_writer=FsspecWriter(path), no_dist=True)


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The file system's own words, which torch wraps."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    root: BaseException = error
    while not isinstance(root, OSError) and (inner := root.__cause__ or root.__context__) is not None:
        root = inner
    chosen = root if isinstance(root, OSError) else error
    return str(chosen).strip().split("\n", 1)[0] or type(chosen).__name__
